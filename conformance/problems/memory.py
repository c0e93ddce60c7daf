"""Caller-owned memory under watch: guard zones, poison, copies, and bytes that must not change."""

import io
import mmap
import os
import pickle
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

Value = TypeVar("Value")

_GUARD_ELEMENTS = 1024
_GUARD_BYTE = 0xA5
_WORD, _FEW = 8, 2**12
_LARGE = 1e4
_NO_RESERVE = 0x4000  # Linux' MAP_NORESERVE
_FREED_BLOCKS = 2
_RAN_OUT = (
    *("can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory", "STATUS_ALLOC_FAILED"),
    *('torch_call_dispatcher( "aten::new_empty"', 'torch_call_dispatcher( "aten::empty'),
)
"""What torch says of a CPU, of the driver and of cuBLAS and cuDNN, and Triton of the driver; and, without a reason, a
library by its stable ABI that was given no tensor, as FlashMLA on a GPU that others fill."""
_POISON_BYTE = 0xFF  # every float format here, e4m3 included, reads all bits set as NaN


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage behind ``tensor``, as uint8, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True)
class Written(ABC):  # memory of the caller that a call writes, before it and after it
    cache: torch.Tensor  # what the call is handed; a view if others share its storage
    before: torch.Tensor  # the bytes of its storage before the call; none where nothing resets them

    expected: ClassVar[tuple[str, ...]]
    """Names of what says what must be there after the call, of which a backend is handed the form alone."""

    def reset(self) -> None:
        if len(self.before):
            storage_bytes(self.cache).copy_(self.before)

    def handed(self) -> Self:
        return replace(self, **{name: _form_of(getattr(self, name)) for name in self.expected})

    @abstractmethod
    def difference(self) -> str:
        """One sentence about what is not as it must be; empty if there is nothing."""


def _form_of(value: Any) -> Any:
    return tuple(map(_form_of, value)) if isinstance(value, tuple) else None if value is None else value.to("meta")


def poison(shape: Iterable[int], dtype: torch.dtype, device: torch.device, kind: str = "nan") -> torch.Tensor:
    """A tensor full of what a kernel must never read: ``nan``, ``inf``, ``large`` finite values or the ``largest``."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if kind == "nan" or dtype.itemsize == 1:
        storage_bytes(tensor).fill_(_POISON_BYTE)
        return tensor
    return tensor.fill_({"inf": torch.inf, "large": _LARGE, "largest": torch.finfo(dtype).max}[kind])


def reserved(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[elements] of a CPU, 0 at first, in shared pages that no limit of memory counts before they are touched."""
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=torch.uint8).view(dtype)


def poison_allocator(shape: Iterable[int], dtype: torch.dtype, device: torch.device, kind: str = "nan") -> None:
    """Fill and free blocks of the size of a result, so that a kernel's fresh buffers do not happen to hold zeros."""
    sizes = tuple(shape)
    _ = [poison(sizes, each, device, kind) for each in (dtype, torch.float32) for _ in range(_FREED_BLOCKS)]


@dataclass(frozen=True)
class Guarded:
    view: torch.Tensor  # the poisoned tensor that a backend may write
    storage: torch.Tensor  # the bytes of guard, view, guard
    guard_bytes: int

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "Guarded":
        count = int(torch.Size(shape).numel())
        flat = torch.empty(count + 2 * _GUARD_ELEMENTS, dtype=dtype, device=device)
        guard = _GUARD_ELEMENTS * flat.element_size()
        storage = storage_bytes(flat)
        storage.fill_(_GUARD_BYTE)
        storage[guard : storage.numel() - guard].fill_(_POISON_BYTE)
        return Guarded(flat[_GUARD_ELEMENTS : _GUARD_ELEMENTS + count].view(shape), storage, guard)

    def written(self) -> int:
        inside = self.storage[self.guard_bytes : self.storage.numel() - self.guard_bytes]
        return int((inside != _POISON_BYTE).sum())

    def overrun(self) -> int:
        zones = (self.storage[: self.guard_bytes], self.storage[self.storage.numel() - self.guard_bytes :])
        return int(sum((zone != _GUARD_BYTE).sum().item() for zone in zones))


def device_lost(device: torch.device) -> bool:
    """Whether a kernel destroyed the GPU's context: every later use of it in this process fails, whoever makes it."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _RAN_OUT)
    )


def whole_memory(device: torch.device) -> int:
    """Bytes of a device's memory that a process may have at most, whoever holds them at the moment."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return installed if limit == resource.RLIM_INFINITY else min(installed, limit)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process could still allocate."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_stats(device)
    return int(free + held.get("reserved_bytes.all.current", 0) - held.get("allocated_bytes.all.current", 0))


def wait_for_memory(device: torch.device, need: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while (free := free_memory(device)) < need and time.monotonic() < end:
        time.sleep(1)
    return free


def same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors [n] uint8 of a CPU are equal; eight bytes are compared at a time, seven times as fast."""
    if (size := x.numel()) <= _FEW:
        return torch.equal(x, y)
    whole = size // _WORD * _WORD
    if not torch.equal(x[whole:], y[whole:]):
        return False
    return torch.equal(x[:whole].view(torch.int64), y[:whole].view(torch.int64))


def differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    on_gpu = [(x != y).any() for x, y in pairs if x.is_cuda]
    # A GPU is asked once for all of them: each question waits for it.
    told = iter(torch.stack(on_gpu).tolist() if on_gpu else ())
    return [next(told) if x.is_cuda else not same_bytes(x, y) for x, y in pairs]


class Snapshot:
    """The bytes of tensors' whole storages at one moment; of each a copy, once something may write it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._places = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
        self._watched = {*self._places.values()}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # bytes of a storage, and the copy, by its place

    def keep(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Copy those of some tensors that are watched, by default all, while they are as they were."""
        if len(self._kept) == len(self._watched):  # asked before each of hundreds of calls
            return
        for tensor in self._tensors.values() if tensors is None else tensors:
            place = tensor.untyped_storage().data_ptr()
            if place in self._watched and place not in self._kept:
                data = storage_bytes(tensor)
                self._kept[place] = data, data.clone()

    def changed(self) -> list[str]:
        differ = dict(zip(self._kept, differing([*self._kept.values()]), strict=True))
        return [name for name, place in self._places.items() if differ.get(place)]


def over(storage: torch.UntypedStorage, like: torch.Tensor, before: int = 0) -> torch.Tensor:
    """A tensor of the same form as another one, over another storage, so many elements further on."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, before + like.storage_offset(), like.shape, like.stride())


class Original(Generic[Value]):
    """A value to be copied, with tensors that must stay; ``shared`` ones are in all. Ten times as fast as deepcopy."""

    def __init__(self, value: Value, shared: Iterable[Any] = ()) -> None:
        self.value, self._shared, self.tensors = value, tuple(shared), list[torch.Tensor]()
        numbers = {id(x): -1 - n for n, x in enumerate(self._shared)}

        def number_of(part: Any) -> int | None:
            if type(part) is torch.Tensor and id(part) not in numbers:
                numbers[id(part)] = len(self.tensors)
                self.tensors.append(part)
            return numbers.get(id(part))

        packer = pickle.Pickler(file := io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
        packer.persistent_id = number_of  # type: ignore[method-assign]
        packer.dump(value)
        self._form = file.getvalue()

    def copy(self) -> Value:
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in self.tensors}
        return self.over({place: storage.clone() for place, storage in storages.items()})

    def over(self, storages: Mapping[int, torch.UntypedStorage]) -> Value:
        """A copy whose tensors lie in these storages, by the place of their own; others stay where they are."""
        placed = ((x.untyped_storage()._cdata, x) for x in self.tensors)
        made = [over(storages[place], x) if place in storages else x for place, x in placed]
        reader = pickle.Unpickler(io.BytesIO(self._form))
        # Shared ones are counted from the end.
        reader.persistent_load = [*made, *reversed(self._shared)].__getitem__  # type: ignore[method-assign]
        value: Value = reader.load()
        return value
