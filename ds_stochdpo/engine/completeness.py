"""Which checkpoint folders are whole: files that reach the disk, and a marker that comes last. Entry: `publish`.

A folder is written under another name, every file is flushed to the disk, the folder is renamed, and only then is
`complete.json` added, with the size of every file. A folder without it is no checkpoint, whatever else it holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

MARKER = "complete.json"
MARKER_FORMAT = 1
"""Raised when the marker's layout changes."""
_READ_BYTES = 2**20
"""So much of a file's end is compared by content, which is what a check can afford."""


def partial_name(folder: Path) -> Path:
    """Name under which `folder` is written; beside it, so that renaming stays on one file system."""
    return folder.with_name(f".{folder.name}.partial")


def flush_file(path: Path) -> None:
    """Force a file's content to the disk; a rename alone survives a power cut before its content does."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def as_readable_as_others(path: Path) -> None:
    """Give a file the mode that any new file beside it has; safetensors makes its files private."""
    probe = path.with_name(f".{path.name}.mode")
    probe.touch()
    try:
        path.chmod(probe.stat().st_mode)
    finally:
        probe.unlink()


def flush_folder(path: Path) -> None:
    """Force a folder's entries (new names, renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, flushed, under its name at once or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    flush_file(partial)
    os.replace(partial, path)
    flush_folder(path.parent)


def publish(partial: Path, folder: Path) -> None:
    """Give a finished folder its name and mark it complete; one rank calls this when all have written.

    A folder of that name is replaced; until then it stays as it is. A process that is killed between the two renames
    leaves it as `.NAME.replaced`.

    Args:
        partial: Folder whose files are all written and flushed.
        folder: Its name, on the same file system.

    Raises:
        OSError: If the disk refuses.
    """
    for inner in (partial, *(p for p in partial.rglob("*") if p.is_dir())):
        flush_folder(inner)
    replaced = folder.with_name(f".{folder.name}.replaced")
    if folder.exists():
        discard(replaced)
        os.rename(folder, replaced)
    os.rename(partial, folder)
    flush_folder(folder.parent)
    files = {str(p.relative_to(folder)): _record(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    write_json(folder / MARKER, {"format": MARKER_FORMAT, "files": files})
    discard(replaced)


def discard(folder: Path) -> None:
    """Remove a checkpoint folder if it is there; the marker goes first, so that no half of it is taken for whole.

    Of a link only the link goes: the folder it leads to is somebody else's.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MARKER).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder: one clause, or None if it is complete.

    Sizes are compared for all files, contents of small ones and of the end of large ones: there torch keeps a checksum
    of each tensor, so that a file of another step is seen, but not a bit that flipped after the file was written.
    """
    if not folder.is_dir():
        return "there is no such folder"
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = {name: dict(record) for name, record in marker["files"].items()}
    except FileNotFoundError:
        return f"it has no {MARKER}, so saving it was not finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MARKER} cannot be read ({error})"
    if marker.get("format") != MARKER_FORMAT:
        return f"its {MARKER} has format {marker.get('format')}, not {MARKER_FORMAT}"
    if not files:
        return f"its {MARKER} names no file"
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != record.get("bytes"):
            return f"{name} has {path.stat().st_size} bytes, not {record.get('bytes')}"
        if len(record) > 1 and _record(path) != record:
            return f"{name} has other content than was saved"
    return None


def marker_digest(folder: Path) -> str:
    """sha256 of the marker, "" where there is none; ranks compare it to know that they see one folder."""
    try:
        return hashlib.sha256((folder / MARKER).read_bytes()).hexdigest()
    except OSError:
        return ""


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _record(path: Path) -> dict[str, Any]:
    """Size, and a digest of the end: of a small file that is all, of a large one of torch its checksums of tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _READ_BYTES))
        end = hashlib.sha256(file.read()).hexdigest()
    return {"bytes": size, "sha256" if size <= _READ_BYTES else "end_sha256": end}
