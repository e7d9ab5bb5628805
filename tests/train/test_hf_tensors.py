"""Files of tensors: every dtype to the bit, and files that are not whole."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tuner.errors import BadInputError
from tuner.train.hf_tensors import read_header, rounded, write_stored

WEIGHTS = {
    "first": np.array([[0.1, -2.5, 3.0], [1e-3, 65504.0, -0.0]], np.float32),
    "second": np.arange(5, dtype=np.float32),
}


def read_all(path):
    return {name: tensor.read() for name, tensor in read_header(path).items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_reads_what_the_safetensors_package_writes(tmp_path, dtype):
    stored = {name: values.astype(dtype) for name, values in WEIGHTS.items()}
    save_file(stored, tmp_path / "a.safetensors", {"format": "pt"})
    found = read_all(tmp_path / "a.safetensors")
    assert set(found) == set(WEIGHTS)
    for name, values in stored.items():
        assert found[name].dtype == np.float32
        assert found[name].tobytes() == values.astype(np.float32).tobytes()


def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path):
    """Bits by hand: 1.0 is 0x3F80, -2.5 is 0xC020, 3.140625 is 0x4049."""
    header = json.dumps({"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    content = struct.pack("<Q", len(header)) + header + struct.pack("<3H", 0x3F80, 0xC020, 0x4049)
    (tmp_path / "b.safetensors").write_bytes(content)
    assert read_all(tmp_path / "b.safetensors")["x"].tolist() == [1.0, -2.5, 3.140625]


def test_bfloat16_is_written_rounded_to_nearest_ties_to_even(tmp_path):
    """Beside 1.0 bfloat16 has steps of 2^-7: half of one is a tie."""
    step = 2.0**-7
    values = {
        "x": np.array([1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -1 - 0.49 * step], "f4")
    }
    write_stored(tmp_path / "c.safetensors", values, "bf16")
    expected = [1.0, 1 + 2 * step, 1 + step, -1.0]
    assert read_header(tmp_path / "c.safetensors")["x"].dtype == "BF16"
    assert read_all(tmp_path / "c.safetensors")["x"].tolist() == expected
    assert rounded(values["x"], "bf16").tolist() == expected


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("fp32", np.float32), ("fp16", np.float16)])
def test_the_safetensors_package_reads_what_is_written(tmp_path, dtype, numpy_dtype):
    write_stored(tmp_path / "d.safetensors", WEIGHTS, dtype)
    found = load_file(tmp_path / "d.safetensors")
    for name, values in WEIGHTS.items():
        assert found[name].tobytes() == values.astype(numpy_dtype).tobytes()
    assert b'"format":"pt"' in (tmp_path / "d.safetensors").read_bytes()


def test_a_number_that_fp16_does_not_hold_is_refused_by_its_tensor(tmp_path):
    with pytest.raises(BadInputError, match="big holds numbers above 65504"):
        write_stored(tmp_path / "e.safetensors", {"big": np.array([70000.0], "f4")}, "fp16")


def refused(path, body=read_all):
    with pytest.raises(BadInputError) as raised:
        body(path)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_damaged_files_are_refused_by_their_name(tmp_path):
    path = tmp_path / "f.safetensors"
    save_file(WEIGHTS, path)
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    damages = {
        "cut off in the payload": whole[:-3],
        "cut off in the header": whole[: header_end - 5],
        "no length": whole[:5],
        "empty": b"",
        "a bit of the header": whole[:20] + bytes([whole[20] ^ 0x80]) + whole[21:],
        "a bit of the length": bytes([whole[0] ^ 1]) + whole[1:],
        "a shape that is not the payload's": whole.replace(b"[2,3]", b"[2,4]"),
        "bytes behind the payload": whole + b"\0",
    }
    for name, content in damages.items():
        path.write_bytes(content)
        assert "is damaged" in refused(path, read_header), name
    path.unlink()
    assert "no such file" in refused(path, read_header)


def test_numbers_that_are_not_finite_and_other_dtypes_are_refused(tmp_path):
    path = tmp_path / "g.safetensors"
    save_file({"x": np.array([1.0, np.nan], np.float32)}, path)
    assert "not finite" in refused(path)
    save_file({"x": np.arange(3)}, path)
    assert "I64 tensors" in refused(path)
    write_stored(path, WEIGHTS, "fp32")
    tensor = read_header(path)["second"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadInputError, match="ends inside a tensor"):
        tensor.read()
