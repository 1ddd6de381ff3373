"""A store without a JVM: a folder that records its downloads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pipelines.delta.stored_files import StoredFiles


class Folder(StoredFiles):
    """A folder in the role of a store; `asked` lists the downloaded files and ranges, `own` has what its log store wrote last."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.__dict__.update(spark=None, location=f"s3a://bucket{folder}", source=folder, folder=copies, asked=[], own={})

    def __getattr__(self, name: str) -> Any:
        return self.__dict__[name]

    def download(self, name: str, to: Path, size_bytes: int | None) -> None:
        self.asked.append(name)
        shutil.copyfile(self.source / name, to)

    def download_range(self, name: str, to: Path, start: int, size: int) -> None:
        self.asked.append((name, start, size))
        with (self.source / name).open("rb") as file:
            file.seek(start)
            to.write_bytes(file.read(size))

    def status(self, name: str) -> tuple[int, int]:
        found = (self.source / name).stat()
        return found.st_mtime_ns // 1000, found.st_size

    def written(self, name: str) -> bytes | None:
        return self.own.pop(name, None)

    def is_file(self, name: str) -> bool:
        return (self.source / name).is_file()

    def is_folder(self, name: str) -> bool:
        return (self.source / name).is_dir()

    def _at(self, name: str) -> str:
        return name

    def has_commits(self) -> bool:
        return any((self.source / "_delta_log").glob("*.json"))
