"""How entries become commands: the steps of a part of a batch, each after the last ended.

    EXIST    ask
    READ     retrieve ─► check ─► delete what is corrupt
    WRITE    seal ─► store if absent ─► replace what was there
    DELETE   ask ─► delete what is there

Threads. A step runs on one worker at a time; parts run beside each other.
Failure scope. A step that breaks answers IO_ERROR for what its part has not settled yet.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from adp_kv.wire.keys import KeyArray
from gateway.cards.base import Op, Status
from gateway.cards.nvme.commands import ONLY_IF_ABSENT, Buffers, CommandArray, CommandBuilder
from gateway.cards.nvme.frames import HEADER_BYTES, Frame
from gateway.cards.nvme.replacing import Replacements
from gateway.cards.nvme.status import Code, codes, entry_status
from gateway.cards.parts import Counters, Part

_logger: Final = logging.getLogger(__name__)

_MAX_ASKED_AGAIN: Final = 8

Chosen: TypeAlias = NDArray[np.int64]
"""int64 [k], rows of a part."""


@dataclass(slots=True)
class NvmePart(Part):
    """Entries of a batch that go through the steps together; all arrays have n rows.

    Attributes:
        fds: int32 [n], of the namespaces.
        nsids: uint32 [n].
        keys: uint64 [n, 2].
        addresses: uint64 [n], 0 for EXIST and DELETE.
        lengths: uint32 [n], 0 for EXIST and DELETE.
        frame: headers and iovecs, row i for entry i.
        mark: of the replacements when the part began.
    """

    fds: NDArray[np.int32]
    nsids: NDArray[np.uint32]
    keys: KeyArray
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    frame: Frame
    mark: int = 0
    asked_again: int = 0
    replacing: bool = False
    finished: bool = False

    @property
    def everything(self) -> Chosen:
        """All rows."""
        return np.arange(len(self.rows), dtype=np.int64)


Step: TypeAlias = Callable[[NvmePart, Chosen, NDArray[np.int32]], None]
"""What follows commands: the part, the rows they were for, their results."""


class Flows:
    """The steps of every operation (see the module)."""

    def __init__(
        self,
        builder: CommandBuilder,
        max_value_bytes: int,
        counters: Counters,
        issue: Callable[[NvmePart, Chosen, CommandArray, Step], None],
        release: Callable[[NvmePart], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """Make the steps.

        Args:
            builder: of commands.
            max_value_bytes: longer entries are TOO_LARGE.
            counters: `values` is kept here.
            issue: runs commands, then the step.
            release: takes the part back; its statuses are final.
            later: runs a function on a worker.
        """
        self._counters = counters
        self._builder = builder
        self._max_value_bytes = max_value_bytes
        self._issue = issue
        self._release = release
        self._later = later
        self._replacements = Replacements()

    def start(self, part: NvmePart) -> None:
        """Begin with a part."""
        part.mark = self._replacements.mark()
        begins: dict[Op, Callable[[NvmePart, Chosen], None]] = {
            Op.EXIST: functools.partial(self._ask, then=self.finish),
            Op.DELETE: functools.partial(self._ask, then=self._delete_found),
            Op.READ: self._read,
            Op.WRITE: self._write,
        }
        begins[part.pending.batch.op](part, part.everything)

    def finish(self, part: NvmePart) -> None:
        """Answer for a part; the second call for one does nothing."""
        if part.finished:
            return
        part.finished = True
        if part.replacing:
            self._replacements.end()
        self._release(part)

    # EXIST, and the first step of DELETE.

    def _ask(self, part: NvmePart, chosen: Chosen, then: Callable[[NvmePart], None]) -> None:
        nsids, keys = part.nsids[chosen], part.keys[chosen]
        if self._builder.dialect.has_exist:
            commands = self._builder.exist(nsids, keys)
        else:
            part.frame.clear(chosen)
            nothing = np.zeros(len(chosen), dtype=np.uint32)
            data = self._aim(part, chosen, nothing, storing=False)
            commands = self._builder.retrieve(nsids, keys, data)
        self._issue(part, chosen, commands, functools.partial(self._answered, then=then))

    def _answered(
        self,
        part: NvmePart,
        chosen: Chosen,
        results: NDArray[np.int32],
        then: Callable[[NvmePart], None],
    ) -> None:
        status = entry_status(results, reading=False)
        if not self._builder.dialect.has_exist:
            here = status == Status.OK
            here[here] &= part.frame.is_ours(chosen[here], part.keys[chosen[here]])
            status[(status == Status.OK) & ~here] = Status.ABSENT
            # Some devices refuse a buffer shorter than the value: then there is one.
            status[codes(results) == Code.INVALID_VALUE_SIZE] = Status.OK
        part.status[chosen] = status
        again = functools.partial(self._ask, then=then)
        if not self._asked_again(part, chosen[status == Status.ABSENT], again):
            then(part)

    def _asked_again(
        self, part: NvmePart, absent: Chosen, again: Callable[[NvmePart, Chosen], None]
    ) -> bool:
        """Ask for absent rows once more if a replacement may have hidden them."""
        hidden = absent.size > 0 and self._replacements.may_have_hidden(part.mark)
        if not hidden or part.asked_again == _MAX_ASKED_AGAIN:
            return False
        part.asked_again += 1

        def retry() -> None:
            part.mark = self._replacements.mark()
            again(part, absent)

        self._replacements.when_none(lambda: self._later(self._guarded(part, retry)))
        return True

    def _guarded(self, part: NvmePart, step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                step()
            except Exception:
                _logger.exception("a step broke")
                self.finish(part)

        return run

    # DELETE.

    def _delete_found(self, part: NvmePart) -> None:
        found = np.flatnonzero(part.status == Status.OK)
        if found.size == 0:
            self.finish(part)
            return
        part.status[found] = Status.IO_ERROR
        commands = self._builder.delete(part.nsids[found], part.keys[found])
        self._issue(part, found, commands, self._deleted)

    def _deleted(self, part: NvmePart, chosen: Chosen, results: NDArray[np.int32]) -> None:
        part.status[chosen] = entry_status(results, reading=False)
        self._counters.add("values", -int((results == 0).sum()))
        self.finish(part)

    # READ.

    def _read(self, part: NvmePart, chosen: Chosen) -> None:
        chosen = self._fitting(part, chosen)
        if chosen.size == 0:
            self.finish(part)
            return
        part.frame.clear(chosen)
        data = self._aim(part, chosen, part.lengths[chosen], storing=False)
        commands = self._builder.retrieve(part.nsids[chosen], part.keys[chosen], data)
        self._issue(part, chosen, commands, self._check)

    def _check(self, part: NvmePart, chosen: Chosen, results: NDArray[np.int32]) -> None:
        status = entry_status(results, reading=True)
        read = chosen[status == Status.OK]
        verdict = np.full(read.size, Status.CORRUPT, dtype=np.uint8)
        # A whole header of another key: the device can't tell the two apart (block dialect).
        foreign = part.frame.is_whole(read) & ~part.frame.is_ours(read, part.keys[read])
        verdict[foreign] = Status.ABSENT
        exact = part.frame.matches(read, part.keys[read], part.addresses[read], part.lengths[read])
        verdict[exact] = Status.OK
        status[status == Status.OK] = verdict
        part.status[chosen] = status
        if not self._asked_again(part, chosen[status == Status.ABSENT], self._read):
            self._remove_corrupt(part)

    def _remove_corrupt(self, part: NvmePart) -> None:
        corrupt = np.flatnonzero(part.status == Status.CORRUPT)
        if corrupt.size == 0:
            self.finish(part)
            return
        commands = self._builder.delete(part.nsids[corrupt], part.keys[corrupt])
        self._issue(part, corrupt, commands, self._corrupt_removed)

    def _corrupt_removed(self, part: NvmePart, chosen: Chosen, results: NDArray[np.int32]) -> None:
        del chosen
        self._counters.add("values", -int((results == 0).sum()))
        self.finish(part)

    # WRITE.

    def _write(self, part: NvmePart, chosen: Chosen) -> None:
        chosen = self._fitting(part, chosen)
        if chosen.size == 0:
            self.finish(part)
            return
        part.frame.seal(chosen, part.keys[chosen], part.addresses[chosen], part.lengths[chosen])
        self._store(part, chosen, ONLY_IF_ABSENT, self._stored)

    def _store(self, part: NvmePart, chosen: Chosen, option: int, then: Step) -> None:
        data = self._aim(part, chosen, part.lengths[chosen], storing=True)
        commands = self._builder.store(part.nsids[chosen], part.keys[chosen], data, option)
        self._issue(part, chosen, commands, then)

    def _stored(self, part: NvmePart, chosen: Chosen, results: NDArray[np.int32]) -> None:
        part.status[chosen] = entry_status(results, reading=False)
        self._counters.add("values", int((results == 0).sum()))
        known = chosen[codes(results) == Code.KEY_EXISTS]
        if known.size == 0:
            self.finish(part)
        elif self._builder.dialect.replaces:
            self._store(part, known, 0, self._replaced)
        else:
            part.replacing = True
            self._replacements.begin()
            commands = self._builder.delete(part.nsids[known], part.keys[known])
            self._issue(part, known, commands, self._removed)

    def _removed(self, part: NvmePart, chosen: Chosen, results: NDArray[np.int32]) -> None:
        self._counters.add("values", -int((results == 0).sum()))
        gone = chosen[(results == 0) | (codes(results) == Code.KEY_ABSENT)]
        if gone.size == 0:
            self.finish(part)
        else:
            self._store(part, gone, ONLY_IF_ABSENT, self._replaced)

    def _replaced(self, part: NvmePart, chosen: Chosen, results: NDArray[np.int32]) -> None:
        status = entry_status(results, reading=False)
        # Another writer of the same key came first: as if it had come last.
        status[codes(results) == Code.KEY_EXISTS] = Status.OK
        part.status[chosen] = status
        if part.replacing:
            self._counters.add("values", int((results == 0).sum()))
        self.finish(part)

    def _fitting(self, part: NvmePart, chosen: Chosen) -> Chosen:
        long = part.lengths[chosen] > self._max_value_bytes
        part.status[chosen[long]] = Status.TOO_LARGE
        return chosen[~long]

    def _aim(
        self, part: NvmePart, chosen: Chosen, lengths: NDArray[np.uint32], *, storing: bool
    ) -> Buffers:
        transfers = self._builder.transfer_sizes(lengths + np.uint32(HEADER_BYTES))
        return part.frame.aim(chosen, part.addresses[chosen], lengths, transfers, storing=storing)
