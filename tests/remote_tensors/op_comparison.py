"""Run entries of torch's operator database locally and on a device, and compare the results."""

from __future__ import annotations

import traceback
import warnings
from typing import Any, NamedTuple

from metadata_check import MetadataCheck
from op_samples import CPU_ARGUMENTS, MOST_SAMPLES, Entry, moved, samples, tensors
from support.optional_packages import optional

torch = optional("torch")

EQUAL, CLOSE, DIFFERENT = "equal", "close", "different"
TOLERANCE = 1e-3

UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operators that return uninitialised memory, so only their metadata is compared."""

WITHOUT_TENSORS = frozenset({"broadcast_shapes"})
"""Functions that neither take nor return tensors."""


class Outcome(NamedTuple):
    """Verdict on the results of an entry (equal, close within the tolerance, or different), and the reason.

    ``samples`` is the number of samples that ran locally without an exception.
    """

    verdict: str
    reason: str = ""
    samples: int = 0


class Difference(Exception):
    """The results on the device differ from the local results."""


def compare(
    entry: Entry, device: str, most: int | None = None, check: MetadataCheck | None = None
) -> Outcome:
    """Compare an entry on a device with a local run, on at most ``most`` samples.

    If ``check`` is given, the entry also counts as different if the metadata on client and node differs.
    """
    verdict, counted = EQUAL, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, sample in enumerate(samples(entry, most or MOST_SAMPLES[entry.dtype])):
            try:
                found = compare_sample(entry, sample, device)
            except Difference as error:
                if check:
                    check.take()
                return Outcome(DIFFERENT, f"sample {place}: {error}", counted)
            counted += found is not None
            if check and (differences := check.take()):
                return Outcome(DIFFERENT, f"sample {place}: metadata: {differences[0]}", counted)
            verdict = CLOSE if found == CLOSE else verdict
    return Outcome(verdict, "", counted)


def compare_sample(entry: Entry, sample: Any, device: str) -> str | None:
    """Compare one sample. Return None if both the local run and the remote run raise."""
    try:
        expected = run(entry, sample, "cpu")
    except Exception as error:
        expected = error
    try:
        found = run(entry, sample, device)
        there = list(tensors(found))
        on = {one.device.type for one in there}
        found = fetched(found)
    except Exception as error:
        if isinstance(expected, Exception):
            return None
        raise Difference(short(error)) from error
    if isinstance(expected, Exception):
        raise Difference(f"does not raise {short(expected)}")
    if there and on != {torch.device(device).type}:
        raise Difference(f"returns tensors on {', '.join(sorted(on))}")
    return compare_values(expected, found, entry.op.name in UNINITIALISED)


def short(error: BaseException) -> str:
    """Return the first line of an exception and the last frame, for the report of a failed entry."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}{place}"


def run(entry: Entry, sample: Any, device: str) -> Any:
    """Run one sample on a device, and return all results."""
    first = moved(sample.input, device)
    args, kwargs = moved((sample.args, sample.kwargs), "cpu" if entry.op.name in CPU_ARGUMENTS else device)
    if entry.op.name in WITHOUT_TENSORS:
        return entry.op.op(first, *args, **kwargs)
    if device != "cpu" and not list(tensors((first, args, kwargs))) and "device" not in kwargs:
        # without the device, a factory would create its tensor on the CPU, and the comparison would prove
        # nothing
        kwargs["device"] = torch.device(device)
    torch.manual_seed(2)
    if entry.kind == "backward":
        return run_backward(entry, sample, (first, args, kwargs))
    with torch.no_grad():
        if entry.kind == "inplace":
            result = entry.op.get_inplace()(first, *args, **kwargs)
            return result, first
        return entry.op.op(first, *args, **kwargs)


def run_backward(entry: Entry, sample: Any, arguments: Any) -> Any:
    """Return the gradients of all inputs, for fixed gradients of the results."""
    first, args, kwargs = arguments
    leaves = [one for one in tensors(arguments) if one.requires_grad]
    result = sample.output_process_fn_grad(entry.op.op(first, *args, **kwargs))
    outputs = [one for one in tensors(result) if one.requires_grad]
    if not outputs or not leaves:
        raise ValueError("no gradient")
    gradients = [gradient_for(one) for one in outputs]
    return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)


def gradient_for(output: Any) -> Any:
    values = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output.dtype)
    return values.to(output.device)


def fetched(value: Any) -> Any:
    """Copy the tensors in a value to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: fetched(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [fetched(one) for one in value]
    return value


def compare_values(expected: Any, found: Any, only_metadata: bool = False) -> str:
    """Return whether two values are equal or close. Raise `Difference` otherwise."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return compare_tensors(expected.detach(), found, only_metadata)
    if isinstance(expected, dict) and isinstance(found, dict):
        expected, found = list(expected.items()), list(found.items())
    if isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(expected) != len(found):
            raise Difference(f"{len(found)} results, expected {len(expected)}")
        verdicts = [compare_values(a, b, only_metadata) for a, b in zip(expected, found, strict=True)]
        return CLOSE if CLOSE in verdicts else EQUAL
    if expected is found or expected == found or (expected != expected and found != found):
        return EQUAL
    if isinstance(expected, float) and isinstance(found, float) and abs(expected - found) <= TOLERANCE:
        return CLOSE
    raise Difference(f"{found!r:.80}, expected {expected!r:.80}")


def compare_tensors(expected: Any, found: Any, only_metadata: bool) -> str:
    for name in ("dtype", "shape", "layout"):
        if getattr(expected, name) != getattr(found, name):
            raise Difference(f"{name} {getattr(found, name)}, expected {getattr(expected, name)}")
    if only_metadata:
        return EQUAL
    expected, found = plain_values(expected), plain_values(found)
    if same_bits(expected, found):
        return EQUAL
    if expected.dtype.is_floating_point and torch.allclose(
        expected.double(), found.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    ):
        return CLOSE
    raise Difference(f"values {found.flatten()[:4].tolist()}, expected {expected.flatten()[:4].tolist()}")


def plain_values(tensor: Any) -> Any:
    """Return a dense, real tensor with the same values."""
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


def same_bits(expected: Any, found: Any) -> bool:
    """Return whether two tensors have the same values. All NaNs count as equal, and so do both zeros."""
    if not expected.dtype.is_floating_point:
        return bool(torch.equal(expected, found))
    missing = expected.isnan()
    if not torch.equal(missing, found.isnan()):
        return False
    expected, found = expected.masked_fill(missing, 0), found.masked_fill(missing, 0)
    return bool(torch.equal(expected, found))
