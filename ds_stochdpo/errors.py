"""The errors a user can cause and mend; each message names the key, the value, what is allowed and what to change.

Each carries the exit code that `launch/train.py` ends with.
"""

EXIT_UNEXPECTED = 1
EXIT_MISTAKE = 2
EXIT_NOT_FINITE = 3
EXIT_HANG = 4
EXIT_LOST = 5
EXIT_SIGNAL = 128
"""Plus the number of the signal: 130 for SIGINT (Ctrl-C), 143 for SIGTERM."""


class StochDPOError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = EXIT_MISTAKE


class ConfigError(StochDPOError, ValueError):
    """A setting is wrong, contradicts another one, or needs something that is not installed."""


class DataError(StochDPOError, ValueError):
    """A preference row or file cannot become a training pair."""


class ModelError(StochDPOError, ValueError):
    """A model cannot be split into two lanes, or its weights and tokenizer do not fit each other."""


class LaunchError(StochDPOError, RuntimeError):
    """The job was started in a way that cannot work: host file, port, environment, or ranks that do not agree."""


class LockstepError(StochDPOError, RuntimeError):
    """The ranks disagree about the step they are about to run."""


class ExportError(StochDPOError, RuntimeError):
    """Exported weights were read back and are not what was trained."""


class CheckpointError(StochDPOError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit the run that would continue from it."""


class NonFiniteError(StochDPOError, ArithmeticError):
    """A loss or gradient is inf or nan, alike on all ranks."""

    exit_code = EXIT_NOT_FINITE


class Interrupted(StochDPOError):  # noqa: N818 - nothing went wrong
    """The ranks agreed to stop, since one of them was sent a signal."""

    def __init__(self, signum: int, message: str = "") -> None:
        """Name the signal.

        Args:
            signum: Its number.
            message: What was reached and what is kept.
        """
        super().__init__(message or f"signal {signum} before training began: there is nothing to keep")
        self.signum = signum
        self.exit_code = EXIT_SIGNAL + signum


ROW_FAULTS: dict[str, tuple[str, str]] = {
    "not text": ("drop", "a required part is null, a number, an object, or a list of what is no message"),
    "no response tokens": ("drop", "a response adds no token to the prompt"),
    "prompt is empty": ("drop", "no token comes before the responses"),
    "identical responses": ("drop", "chosen and rejected have the same tokens"),
    "identical after truncation": ("drop", "the responses differ only in what was cut off"),
    "no assistant turn": ("drop", "no prompt column, and the texts share no 'Assistant:' tag"),
    "histories differ": ("drop", "what others than the assistant say lies after the point where the two part"),
    "unknown role": ("drop", "a message is from somebody whom no chat template knows"),
    "not a function call": ("drop", "a tool call is not JSON, or has no name"),
    "tools are not JSON": ("drop", "the tools column is no list of tools"),
    "bad template arguments": ("drop", "chat_template_kwargs is no object, or sets what the trainer sets"),
    "template refuses the row": ("drop", "the chat template raises an error"),
    "template rewrites the prompt": ("drop", "the last prompt message changes once a response follows"),
    "not JSON": ("data_errors", "the line is no JSON value"),
    "not UTF-8": ("data_errors", "the line has bytes that are no UTF-8"),
    "file cut off": ("data_errors", "a compressed file of JSON lines ends early; its whole lines are used"),
    "not an object": ("data_errors", "the row is JSON, but no object with columns"),
    "responses of two kinds": ("data_errors", "one response is a string, the other one messages"),
    "not an assistant message": ("data_errors", "a response does not end with the assistant"),
    "template drops tool calls": ("data_errors", "the chat template leaves out a tool call or its result"),
    "no known layout": ("first row", "the columns are those of no layout"),
    "not a preference pair": ("first row", "unpaired or rated responses, with no word on which is chosen"),
    "no chat template": ("stop", "the row holds messages, and the tokenizer has no template for them"),
}
"""Every reason for which a row makes no pair, with its policy and what it means.

Policies: `drop`: left out and counted; `data_errors`: as that setting says; `first row`: an error if the set begins
with it, else left out and counted; `stop`: always an error.
"""


def faults_with(policy: str) -> str:
    """The reasons with this policy, joined by commas, for help texts."""
    return ", ".join(reason for reason, (its_policy, _) in ROW_FAULTS.items() if its_policy == policy)
