"""Collect everything that is wrong with a stored record, then raise it as one error."""

from __future__ import annotations

from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

from shardstore.errors import CorruptSnapshotError, FormatError
from shardstore.format.strict_json import StrictJSONError, quote, scan

MAX_LISTED: Final = 1000
"""Problems named in one error; the rest is counted. A hostile file must not grow its own error."""

MAX_INT: Final = 2**63 - 1

_FAILED: Final = object()


def fields_of(record: msgspec.Struct) -> dict[str, Any]:
    """The fields of a record by name, as they are."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


class Findings:
    """Problems of one file: breaches of the format, and signs of damage."""

    def __init__(self, source: str) -> None:
        """`source` names the file in every message."""
        self.source = source
        self.damage: list[str] = []
        self.problems: list[str] = []
        self._num_unlisted = 0

    def add(self, problem: str) -> None:
        """Note a breach of the format."""
        if len(self.problems) < MAX_LISTED:
            self.problems.append(problem)
        else:
            self._num_unlisted += 1

    def read_json(self, data: bytes | str, what: str) -> object:
        """Decode strict JSON and note what is wrong with it; None if it cannot be decoded."""
        try:
            value, problems = scan(data)
        except StrictJSONError as error:
            value, problems = None, error.problems
        for problem in problems:
            self.add(f"{what}: {problem}")
        return value

    def read_object(self, data: bytes, what: str) -> dict[str, Any]:
        """Decode the JSON object that is the whole file. Damage explains text that is none.

        Raises:
            CorruptSnapshotError: It is no JSON object, and damage was noted.
            FormatError: It is no JSON object.
        """
        value = self.read_json(data, what)
        if isinstance(value, dict):
            return value
        self.add(f"the {what} is not a JSON object")
        if self.damage:
            self.problems.clear()
            self._num_unlisted = 0
        raise self._error(f"the {what} cannot be read")

    def read_record(self, value: object, record: type[msgspec.Struct]) -> dict[str, Any]:
        """Convert the fields of a record, each by itself; those that do not fit are noted and left out."""
        try:
            return fields_of(msgspec.convert(value, record))
        except msgspec.ValidationError:
            return self._read_fields(value, record, "")

    def raise_any(self, what: str) -> None:
        """Raise what was found, if anything.

        Raises:
            CorruptSnapshotError: Damage and nothing else.
            FormatError: The format is broken; damage is listed too.
        """
        if self.problems or self.damage:
            raise self._error(what)

    def _error(self, what: str) -> CorruptSnapshotError | FormatError:
        if not self.problems:
            return CorruptSnapshotError(
                f"{self.source}: {'; '.join(self.damage)}. It is not as it was written",
                file=self.source,
            )
        problems = [*self.damage, *self.problems]
        if self._num_unlisted:
            problems.append(f"and {self._num_unlisted} more")
        return FormatError(f"{self.source}: {what}", problems=problems)

    def _read_fields(
        self, value: object, record: type[msgspec.Struct], where: str
    ) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.add(f"{where or 'the record'} is not an object")
            return {}
        types = get_type_hints(record)
        found: dict[str, Any] = {}
        for field in msgspec.structs.fields(record):
            path = f"{where}.{field.name}" if where else field.name
            if field.name in value:
                item = self._read(value[field.name], types[field.name], path)
                if item is not _FAILED:
                    found[field.name] = item
            elif field.required:
                self.add(f"{path} is missing")
            else:
                found[field.name] = field.default
        for name in value.keys() - types.keys():
            self.add(f"{where or 'the record'} has the unknown field {quote(name)}")
        return found

    def _read(self, value: object, kind: Any, where: str) -> Any:
        """Convert one value; where that fails, go into it to name every part that does."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            reason = str(error)
        num_before = len(self.problems) + self._num_unlisted
        if value is not None and type(None) in get_args(kind):
            (kind,) = (part for part in get_args(kind) if part is not type(None))
        args = get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            self._read_fields(value, kind, where)
        elif get_origin(kind) is tuple and args[-1] is Ellipsis and isinstance(value, list):
            for index, item in enumerate(value):
                self._read(item, args[0], f"{where}[{index}]")
        elif get_origin(kind) is dict and isinstance(value, dict):
            for name, item in value.items():
                self._read(item, args[1], f"{where}[{quote(name)}]")
        if len(self.problems) + self._num_unlisted == num_before:
            self.add(f"{where}: {reason}")
        return _FAILED
