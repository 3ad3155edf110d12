"""oneDNN handlers whose packed weight lies in memory that we choose: the parameter's own.

vLLM hands large linear weights to oneDNN, which packs them into memory that nobody can export, give back or refill.
It asks the C library for that memory, with `posix_memalign`, and of all it asks for while a handler is made only the
packed weight is exactly as large as the weight. So for that moment the slot through which vLLM's library reaches
`posix_memalign` (its procedure linkage table, an ELF relocation) leads here, and that one request is answered with
the parameter's memory. The handler then computes from the segment, with the very kernel and numbers of plain vLLM,
and follows whatever is written there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops as ops
from elftools.elf.elffile import ELFFile

PRIMITIVES = 32
"""Matrix shapes whose primitive a handler keeps, as vLLM itself asks for."""
_SYMBOL = "posix_memalign"
_LIBRARY = "/vllm/_C"

_Allocate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
_allocate = _Allocate((_SYMBOL, ctypes.CDLL(None)))


class NotTaken(Exception):
    """oneDNN did not put the packed weight where it was told to; the weight is as it was."""


def _mappings() -> Iterator[tuple[int, int, str, int, str]]:
    """(start, end, rights, offset in the file, path) of this process's named mappings."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, offset, _, _, *path = line.split(None, 5)
        if path:
            low, high = (int(part, 16) for part in place.split("-"))
            yield low, high, rights, int(offset, 16), path[0]


def find_slots() -> tuple[int, ...]:
    """Addresses of the pointers through which vLLM's loaded kernel libraries call `posix_memalign`.

    Empty where there are none, or where they cannot be written (read-only relocations).
    """
    mappings = list(_mappings())
    writable = [(low, high) for low, high, rights, _, _ in mappings if "w" in rights]
    found = []
    for base, path in {(low, path) for low, _, _, offset, path in mappings if _LIBRARY in path and not offset}:
        with Path(path).open("rb") as file:
            library = ELFFile(file)
            relocations = library.get_section_by_name(".rela.plt")
            if relocations is None:
                continue
            symbols = library.get_section(relocations["sh_link"])
            found += [
                base + relocation["r_offset"]
                for relocation in relocations.iter_relocations()
                if symbols.get_symbol(relocation["r_info_sym"]).name == _SYMBOL
            ]
    return tuple(slot for slot in found if any(low <= slot < high for low, high in writable))


class InPlace:
    """Makes handlers inside given tensors. Not for two threads at once; others may allocate meanwhile."""

    def __init__(self) -> None:
        """Raises NotTaken where vLLM's library cannot be told where to put a weight."""
        self._slots = [ctypes.c_void_p.from_address(slot) for slot in find_slots()]
        if not self._slots:
            raise NotTaken("vLLM's library calls no posix_memalign through a writable slot")

    def handler(self, weight: torch.Tensor, plain: torch.Tensor | None = None) -> Any:
        """A handler for `weight` (N, K), which holds plain values and afterwards the packed ones; with `plain`, another
        tensor of the same shape, those of that one.

        The handler lives as long as the process: its destructor would hand the tensor's memory to `free`.
        Raises NotTaken.
        """
        if plain is None:
            plain = weight.clone()
        with self._answering(weight) as taken:
            made = ops.create_onednn_mm(plain.t(), PRIMITIVES)
        if not taken:
            raise NotTaken(f"oneDNN asked for no memory of {weight.nbytes} bytes, aligned as the weight is")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        return made

    @contextmanager
    def _answering(self, weight: torch.Tensor) -> Iterator[list[int]]:
        """While entered, this thread's first request for exactly the weight's bytes gets the weight's memory."""
        taken: list[int] = []
        thread, place, size = threading.get_ident(), weight.data_ptr(), weight.nbytes

        def allocate(into: Any, alignment: int, length: int) -> int:
            if length == size and not taken and not place % alignment and threading.get_ident() == thread:
                taken.append(place)
                into[0] = place
                return 0
            return int(_allocate(into, alignment, length))

        # The function object must outlive every call through the slots: it is held until they are put back.
        ours = _Allocate(allocate)
        usual = [slot.value for slot in self._slots]
        for slot in self._slots:
            slot.value = ctypes.cast(ours, ctypes.c_void_p).value
        try:
            yield taken
        finally:
            for slot, value in zip(self._slots, usual, strict=True):
                slot.value = value
