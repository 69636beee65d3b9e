"""What a set holds, for a reader: its first rows as the model sees them, its lengths, and what becomes of its rows.

Floor: data. Entry: `survey`, then `Survey.text`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ds_stochdpo.data.columns import column_list
from ds_stochdpo.data.dataset import Account
from ds_stochdpo.data.outcome import Outcome
from ds_stochdpo.data.tally import printable
from ds_stochdpo.data.truncate import LengthLimits
from ds_stochdpo.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARTS = ("prompt", "chosen", "rejected")
LEGEND = "|  not scored     >  scored     { }  both responses begin with this"
MOST_CHARACTERS = 1200
"""Characters shown of one part, half of them from its end."""
_MOST_LENGTHS = 6
_COLOURS = {"place": "1", "prompt": "2", "chosen": "32", "rejected": "31", "shared": "4", "bad": "33"}


@dataclass
class Survey:
    """A set that was looked through.

    Attributes:
        account: Counts, as training would make them.
        first: Outcomes of the first rows.
        stops: Message of each row that would end a training run.
        full: Tokens of prompt, chosen and rejected before cutting, int64 [pairs, 3].
        kept: The same after cutting.
        shared: Tokens that both responses begin with, int64 [pairs].
    """

    account: Account
    first: list[Outcome] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    full: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    kept: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    shared: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def text(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limits: LengthLimits,
        *,
        colour: bool = False,
        most_characters: int | None = MOST_CHARACTERS,
        width: int | None = None,
    ) -> str:
        """The whole report.

        Args:
            tokenizer: The one that made the tokens.
            limits: Those in force.
            colour: Mark the parts by colour too.
            most_characters: Characters shown of one part at most; None: all.
            width: Columns after which the text of rows is wrapped; None: never.
        """
        show = _RowText(tokenizer, colour, most_characters, width)
        lines = [LEGEND, ""] if self.first else []
        for number, outcome in enumerate(self.first):
            lines += [*show.row(number, outcome), ""]
        lines += _count_lines(self)
        if len(self.full):
            lines += ["", *_length_lines(self), "", *_limit_lines(self, limits)]
        return "\n".join(lines)


def survey(outcomes: Iterable[Outcome], *, data_errors: str, num_rows: int) -> Survey:
    """Look through all rows; one that would end a training run is noted and counted, and the next ones are looked at.

    Args:
        outcomes: Of every row, in order.
        data_errors: `stop` or `skip`, as in the settings.
        num_rows: Rows to keep for showing.
    """
    found = Survey(Account(data_errors))
    full, kept, shared = [], [], []
    for outcome in outcomes:
        if len(found.first) < num_rows:
            found.first.append(outcome)
        try:
            pair = found.account.take(outcome)
        except DataError as error:
            found.stops.append(str(error))
            found.account.tally.add(f"stopped/{outcome.reason}", outcome.source, outcome.detail)
            continue
        if pair is not None:
            full.append(outcome.full_lengths)
            kept.append((len(pair.prompt_ids), len(pair.chosen_ids), len(pair.rejected_ids)))
            shared.append(pair.shared_start)
    found.full, found.kept = (np.array(lengths, dtype=np.int64).reshape(-1, 3) for lengths in (full, kept))
    found.shared = np.array(shared, dtype=np.int64)
    return found


class _RowText:
    """Writes rows as lines of text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, colour: bool, most_characters: int | None, width: int | None
    ) -> None:
        self.tokenizer, self.colour, self.most_characters = tokenizer, colour, most_characters
        self.width = width

    def row(self, number: int, outcome: Outcome) -> list[str]:
        head = self._paint("place", f"row {number + 1}: {outcome.source}")
        if outcome.reason:
            return [head, f"  {self._paint('bad', f'makes no pair: {outcome.reason}')} ({outcome.detail})"]
        lines = [head, *(self._paint("bad", f"  noted: {note}") for note in outcome.notes)]
        shared = _shared_start(outcome)
        sides = {"chosen": outcome.chosen_ids, "rejected": outcome.rejected_ids}
        lines += self._part("prompt", "not scored", outcome, [outcome.prompt_ids, outcome.prompt_ids[:0]])
        for side, ids in sides.items():
            told = f"scored, {shared} at the start shared" if shared else "scored"
            lines += self._part(side, told, outcome, [outcome.prompt_ids, ids[:shared], ids[shared:]])
        return lines

    def _part(self, name: str, told: str, outcome: Outcome, pieces: Sequence[np.ndarray]) -> list[str]:
        """Heading and text of one part; of a response `pieces` are the prompt, the shared start and the rest."""
        is_prompt, index = name == "prompt", PARTS.index(name)
        full, kept = outcome.full_lengths[index], len(getattr(outcome, f"{name}_ids"))
        cut = f" (cut from {full:,}: {', '.join(c for c in outcome.cuts if c.startswith(name))})" if kept < full else ""
        prompt, *rest = self._decode(pieces)
        text = prompt if is_prompt else f"{{{rest[0]}}}{rest[1]}" if rest[0] else rest[1]
        gutter = "|" if is_prompt else ">"
        lines = [f"    {gutter} {self._paint(name, line)}" for line in self._lines(text)]
        return [f"  {name}: {kept:,} tokens, {told}{self._paint('bad', cut) if cut else ''}", *lines]

    def _decode(self, pieces: Sequence[np.ndarray]) -> list[str]:
        """Text of each piece behind those before it: decoded alone, it may lose its first space."""
        texts, done = [], ""
        for end in range(1, len(pieces) + 1):
            whole = str(self.tokenizer.decode(np.concatenate(pieces[:end]), clean_up_tokenization_spaces=False))
            follows = whole.startswith(done)
            texts.append(whole[len(done) :] if follows else str(self.tokenizer.decode(pieces[end - 1])))
            done = whole
        return texts

    def _lines(self, text: str) -> list[str]:
        most = self.most_characters
        if most is not None and len(text) > most:
            left_out = len(text) - most
            text = f"{text[: most // 2]}\n[... {left_out:,} characters ...]\n{text[-(most // 2) :]}"
        lines = [printable(line) for line in text.split("\n")]
        if len(lines) > 1 and not lines[-1]:
            # A line end at the very end would not be seen.
            lines[-2:] = [lines[-2] + "\\n"]
        if self.width is None:
            return lines
        room = max(self.width - len("    > "), 20)
        return [part for line in lines for part in textwrap.wrap(line, room, drop_whitespace=False) or [""]]

    def _paint(self, kind: str, text: str) -> str:
        return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if self.colour and text else text


def _shared_start(outcome: Outcome) -> int:
    shortest = min(len(outcome.chosen_ids), len(outcome.rejected_ids))
    differs = np.flatnonzero(outcome.chosen_ids[:shortest] != outcome.rejected_ids[:shortest])
    return int(differs[0]) if len(differs) else shortest


def _count_lines(found: Survey) -> list[str]:
    tally = found.account.tally
    lines = [f"{tally.counts['read']:,} rows read, {tally.counts['used']:,} pairs"]
    kinds = {"stopped/": "ends a training run", "dropped/": "dropped", "truncated/": "cut", "noted/": "noted"}
    for prefix, verb in kinds.items():
        for key in (key for key in tally.counts if key.startswith(prefix)):
            held = f" ({tally.first_details[key]})" if key in tally.first_details else ""
            lines.append(f"  {verb}: {tally.counts[key]:,} {key.removeprefix(prefix)}{held}")
            lines.append(f"    {_places(tally.first_lines[key], tally.counts[key])}")
    if found.account.ignored:
        lines.append(f"  columns not used: {column_list(found.account.ignored)}")
    return lines


def _places(places: Sequence[str], count: int) -> str:
    """First places in few words: the name of a file once, then line numbers."""
    shown, file = [], ""
    for place in places:
        name, _, number = place.rpartition(":")
        shown.append(number if name == file else place)
        file = name
    return ", ".join(shown) + (", ..." if count > len(places) else "")


def _length_lines(found: Survey) -> list[str]:
    full = found.full
    longest = full[:, 0] + full[:, 1:].max(axis=1)
    title = "tokens, before cutting"
    lines = [f"{title:<28}{'min':>9}{'median':>9}{'p95':>9}{'max':>9}{'in all':>15}"]
    columns = [*zip(PARTS, full.T, strict=True), ("prompt + longer response", longest)]
    for name, lengths in columns:
        figures = [lengths.min(), np.median(lengths), np.percentile(lengths, 95), lengths.max()]
        total = f"{lengths.sum():>15,}"
        lines.append(f"  {name:<26}" + "".join(f"{figure:>9,.0f}" for figure in figures) + total)
    kept, scored = found.kept.sum(axis=0), int(found.kept[:, 1:].sum())
    return [
        *lines,
        f"one pass runs {kept.sum():,} tokens, each prompt once; {scored:,} are scored, "
        f"{int(found.shared.sum()):,} of them in starts that both responses share",
    ]


def _limit_lines(found: Survey, limits: LengthLimits) -> list[str]:
    num_pairs = len(found.full)
    longest = found.full[:, 0] + found.full[:, 1:].max(axis=1)
    num_cut = int((found.full != found.kept).any(axis=1).sum())
    lost = 1 - found.kept.sum() / found.full.sum()
    in_force = f"max_length {limits.max_length:,}" if limits.max_length is not None else "no max_length"
    if limits.max_prompt_length is not None:
        in_force += f", max_prompt_length {limits.max_prompt_length:,}"
    lines = [f"in force: {in_force}; cuts {num_cut:,} of {num_pairs:,} pairs ({num_cut / num_pairs:.1%}), "
             f"{lost:.1%} of all tokens"]  # fmt: skip
    top = int(longest.max())
    powers = [2**power for power in range(1, top.bit_length() + 1)]
    tried = [length for length in powers if length >= longest.min()][-_MOST_LENGTHS:]
    shares = "   ".join(f"{length:,}: {(longest > length).mean():.1%}" for length in tried)
    return [*lines, f"pairs that another max_length would cut:  {shares}", f"the longest pair needs {top:,}"]
