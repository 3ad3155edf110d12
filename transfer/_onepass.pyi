from array import array

WIDEST: int

def copy(to: memoryview, source: memoryview, parts: array[int], size: int, bits: int, /) -> bytes: ...
