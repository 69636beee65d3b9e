#!/usr/bin/env bash
# One training job on the machines of a Slurm cluster, which goes on by itself after a preemption or the time limit:
#     sbatch launch/slurm.sh --config my.yaml --output_dir /shared/run1 [--key value ...]
# Write your partition, account and number of machines below, or give them to sbatch. Model, pairs and output_dir lie on
# a file system that all machines share. Set save_steps in the settings: without it nothing is kept.
#SBATCH --job-name=ds_stochdpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Ten minutes before the time limit this script, and only it, is sent USR1: time to finish a step and save.
#SBATCH --signal=B:USR1@600
set -euo pipefail

ranks_per_node="${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}"
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR="${machines[0]}"
# Two jobs on one machine do not meet; torchrun opens this port on the first machine.
MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
export MASTER_ADDR MASTER_PORT
# Each rank would else start as many threads as the machine has cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(((${SLURM_CPUS_PER_TASK:-1} + ranks_per_node - 1) / ranks_per_node))}"
# Slurm kills what is left when its own grace time is over; until then saving may take as long as it needs.
shutdown_timeout="${SHUTDOWN_TIMEOUT:-570}"

# The settings of this job are this script's arguments. `latest` starts anew where nothing was saved yet.
# shellcheck disable=SC2016  # SLURM_NODEID is another one on each machine.
srun --kill-on-bad-exit=1 bash -c '
    exec torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$0" --node_rank "$SLURM_NODEID" \
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --shutdown_timeout "$1" \
        launch/train.py --resume_from_checkpoint latest "${@:2}"' \
    "$ranks_per_node" "$shutdown_timeout" "$@" &
step=$!

stopped=""
# Not through srun, which answers TERM with KILL: this tells the processes of the job step, not this script. The ranks
# save after the optimizer step they are in.
trap 'stopped=USR1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# A preemption or scancel; Slurm has told the job step itself.
trap 'stopped=TERM' TERM
while true; do
    # A trap ends `wait` early, with a code above 128 though the step still runs.
    if wait "$step"; then code=0; else code=$?; fi
    kill -0 "$step" 2>/dev/null || break
done

if [[ $stopped == USR1 && $code != 0 ]]; then
    echo "the time limit is near: job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
elif [[ $stopped == TERM ]]; then
    # A preempted job goes back into the queue by --requeue; one that was cancelled stays away.
    echo "job $SLURM_JOB_ID was preempted or cancelled"
fi
exit "$code"
