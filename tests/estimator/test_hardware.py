"""GPU profiles: the shipped ones load, a user's file is accepted, and mistakes are named on one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosac.errors import HardwareError
from autosac.estimator import known_hardware, load_hardware

_MIB = 2**20


@pytest.mark.parametrize("name", known_hardware())
def test_every_shipped_profile_loads_under_its_own_name(name: str) -> None:
    """The file's name and the profile's name agree, and usable memory does not exceed the nominal."""
    hardware = load_hardware(name)
    assert hardware.name == name
    assert 0.9 * hardware.memory_bytes < hardware.usable_bytes <= hardware.memory_bytes


def test_the_promised_gpus_are_there() -> None:
    """Every GPU that the documentation names has a profile."""
    wanted = """a100-sxm-40gb a100-pcie-40gb a100-sxm-80gb a100-sxm-80gb-330w a100-pcie-80gb h100-sxm-80gb h100-pcie-80gb
    h100-nvl-94gb h100-sxm-96gb-meta h200-sxm-141gb h20-96gb b200-sxm-180gb l40s a40 a10g rtx-a6000 rtx-6000-ada
    rtx-3090 rtx-4090 rtx-5090 mi300x v100-sxm2-16gb v100-sxm2-32gb v100-pcie-16gb v100-pcie-32gb t4 l4 rtx-pro-6000
    h800-sxm-80gb a800-sxm-80gb gh200-96gb gb200-186gb b300-sxm-288gb
    gb300-288gb mi325x rtx-2080-ti rtx-3060-12gb rtx-3080-10gb rtx-a5000"""
    assert set(wanted.split()) <= set(known_hardware())


def test_figures_of_an_h100() -> None:
    """989 TFLOP/s in bf16, 67 in fp32, 494.5 with TF32;

    32 MiB of cuBLAS workspace; compute capability 9.0.
    """
    h100 = load_hardware("h100-sxm-80gb")
    assert h100.peak_flops("bfloat16") == 989e12
    assert h100.peak_flops("float32") == 67e12
    assert h100.peak_flops("tf32") == 494.5e12
    assert h100.cublas_workspace_bytes == 32 * _MIB
    assert h100.compute_capability == (9, 0)


def test_ampere_workspace_is_pytorchs_default() -> None:
    """:4096:2:16:8, that is 2 x 4096 KiB + 8 x 16 KiB."""
    assert load_hardware("a100-sxm-80gb").cublas_workspace_bytes == 2 * 4096 * 1024 + 8 * 16 * 1024


def test_missing_rates_fall_to_the_next_wider_type() -> None:
    """An A100 has no 8-bit floats: they run as bf16."""
    a100 = load_hardware("a100-sxm-80gb")
    assert a100.peak_flops("float8") == a100.peak_flops("bfloat16")


@pytest.mark.parametrize(("name", "half"), [("v100-sxm2-16gb", "float16"), ("t4", "float16"), ("l4", "bfloat16")])
def test_before_ampere_matrix_units_know_no_bfloat16(name: str, half: str) -> None:
    """There, bfloat16 runs at float32's rate, and TF32 is float32."""
    gpu = load_hardware(name)
    assert gpu.half == half and gpu.multiplies(half) and gpu.multiplies("tf32") == (half == "bfloat16")
    if half == "float16":
        assert gpu.peak_flops("bfloat16") == gpu.peak_flops("tf32") == gpu.peak_flops("float32")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.toml", "GPU profile mine.toml is not a file"),
        ("profiles/mine", "GPU profile profiles/mine is not a file"),
        ("mine", "unknown GPU 'mine': give one of"),
        ("h100\x1b", "there are control characters in it"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_names_that_nothing_has(name: str, message: str) -> None:
    """What looks like a path is missed as a file, anything else as a name."""
    with pytest.raises(HardwareError) as error:
        load_hardware(name)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_users_file_may_start_from_a_shipped_profile(tmp_path: Path) -> None:
    """`base` gives everything that the file does not; tables are merged key by key."""
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100-sxm-80gb"\nname = "capped"\ntdp_w = 450\n[peak_tflops]\nbfloat16 = 700.0\n')
    mine = load_hardware(str(path))
    assert (mine.name, mine.tdp_w, mine.sm_count) == ("capped", 450.0, 132)
    assert mine.peak_flops("bfloat16") == 700e12
    assert mine.peak_flops("float32") == 67e12


def test_an_unknown_gpu_lists_the_known_ones() -> None:
    """The message names every shipped profile and how to give a file."""
    with pytest.raises(HardwareError, match=r"unknown GPU 'h101'.*h100-sxm-80gb.*TOML file") as error:
        load_hardware("h101")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("short", "name"), [("h200", "h200-sxm-141gb"), ("H100_PCIe", "h100-pcie-80gb"), ("MI300X", "mi300x")]
)
def test_the_beginning_of_a_name_is_enough_where_it_fits_one_gpu(short: str, name: str) -> None:
    """Case and underscores do not matter."""
    assert load_hardware(short).name == load_hardware(name).name


def test_the_beginning_of_several_names_lists_these() -> None:
    """An H100 comes in several kinds with different memory: none is chosen for the user."""
    with pytest.raises(HardwareError, match=r"several kinds of GPU 'h100-sxm': .* h100-sxm-80gb, h100-sxm-96gb-meta$"):
        load_hardware("h100-sxm")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("sm_count = 0", "sm_count must be a whole number from 1 to 65536, not 0$"),
        ("sm_count = 1.5", "sm_count must be a whole number from 1 to 65536, not 1.5$"),
        ("mem_bandwidth_gbps = nan", "mem_bandwidth_gbps must be a number from 0.0001 to 1e\\+07, not nan$"),
        ("mem_bandwidth_gbps = true", "mem_bandwidth_gbps must be a number from .*, not True$"),
        ("link_gbps = -1.0", "link_gbps must be a number from 0.0001 to 1e\\+07, not -1.0$"),
        ('vendor = ""', "vendor must be a non-empty text on one line, not ''$"),
        ("colour = 3", "colour is not a known key"),
        ("compute_capability = [9]", r"compute_capability\[1\] is missing$"),
        ("compute_capability = [9, 0, 0]", r"compute_capability must be a list of at most 2, not \[9, 0, 0\]$"),
        ("usable_bytes = 999999999999", "usable_bytes is above memory_bytes"),
        ("[peak_tflops]\nfloat7 = 1.0", "peak_tflops.float7 is not a known key: expected float64, float32, tf32,"),
        ("[efficiency]\nmatmul = 1.2", "efficiency.matmul must be at most 1"),
        ("sm_count = ", "is not valid TOML"),
        ("base = 3", "base must be the name or path"),
        ('base = "../other.toml"', "base '../other.toml' lies outside of the profile's folder"),
        ('base = "/etc/passwd"', "base '/etc/passwd' lies outside of the profile's folder"),
        ('cluster = "../c.toml"', "cluster '../c.toml' lies outside of the profile's folder"),
        ('models_of = "../x"', "models_of must be the name of a profile"),
        ('measured = "../ops.json"', "measured '../ops.json' lies outside of the profile's folder"),
        ('calibrated = "../fit.json"', "calibrated '../fit.json' lies outside of the profile's folder"),
    ],
)
def test_a_wrong_profile_is_one_line_that_names_the_key(tmp_path: Path, lines: str, message: str) -> None:
    """Each mistake in a file gives its path and its key."""
    path = tmp_path / "wrong.toml"
    base = "" if lines.startswith("base") else 'base = "h100-sxm-80gb"\n'
    path.write_text(base + lines + "\n")
    with pytest.raises(HardwareError, match=message) as error:
        load_hardware(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    """A file without a base must give everything."""
    path = tmp_path / "short.toml"
    path.write_text('name = "x"\ncompute_capability = [9, 0]\n')
    with pytest.raises(HardwareError, match="vendor is missing"):
        load_hardware(str(path))


def test_a_misspelt_key_is_named_before_the_missing_one(tmp_path: Path) -> None:
    """A file without a base that spells a key wrongly hears of that key, not of the one that is therefore missing."""
    path = tmp_path / "typo.toml"
    path.write_text('name = "x"\ncompute_capability = [9, 0]\nvendro = "NVIDIA"\n')
    with pytest.raises(HardwareError, match=r"vendro is not a known key: did you mean vendor\?$"):
        load_hardware(str(path))


def test_a_base_below_the_profile(tmp_path: Path) -> None:
    """A file in a folder below may be the base; a link out of the folder may not."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "first.toml").write_text('base = "h100-sxm-80gb"\ntdp_w = 400\n')
    (tmp_path / "mine.toml").write_text('base = "below/first.toml"\n')
    assert load_hardware(str(tmp_path / "mine.toml")).tdp_w == 400.0
    (tmp_path / "below" / "link.toml").symlink_to(tmp_path / "mine.toml")
    (tmp_path / "below" / "wrong.toml").write_text('base = "link.toml"\n')
    with pytest.raises(HardwareError, match=r"base 'link\.toml' lies outside"):
        load_hardware(str(tmp_path / "below" / "wrong.toml"))


def test_profiles_based_on_each_other_end(tmp_path: Path) -> None:
    """A circle of bases is an error, not a hang."""
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(HardwareError, match="based on each other"):
        load_hardware(str(tmp_path / "a.toml"))
