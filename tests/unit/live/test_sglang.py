"""What can be said of SGLang without it: which policies fit, whether a release's seams hold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from headgate.core.errors import InputError
from headgate.live.sglang import fit, seams
from headgate.methods.names import BATCH


def test_every_policy_is_fit_or_refused():
    known = fit.EXCLUSIVE | fit.MIXING | fit.UNFIT.keys() | {"sglang", "auto"}
    assert set(BATCH) <= known


@pytest.mark.parametrize("policy", fit.UNFIT)
def test_unfit_policies_are_refused_whatever_the_flags(policy):
    with pytest.raises(InputError, match=f"policy {policy} .*; choose eb"):
        fit.check_fit(policy, mixed_chunk=True)


def test_mixing_needs_the_flag():
    fit.check_fit("eb", mixed_chunk=False)
    fit.check_fit("own.py:Mine", mixed_chunk=False)
    with pytest.raises(InputError, match="--enable-mixed-chunk"):
        fit.check_fit("keep", mixed_chunk=False)
    assert fit.mixes("own.py:Mine") and fit.mixes("eb+") and not fit.mixes("eb")


def scheduler(**other):
    plain = {
        "server_args": SimpleNamespace(use_ray=False), "pp_group": SimpleNamespace(world_size=1),
        "require_mlp_sync": False, "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "disaggregation_mode": SimpleNamespace(value="null"), "dllm_config": None, "is_generation": True,
        "chunked_prefill_size": 8192,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **other})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"server_args": SimpleNamespace(use_ray=True)}, "--use-ray"),
        ({"pp_group": SimpleNamespace(world_size=2)}, "pipeline parallelism"),
        ({"require_mlp_sync": True}, "DP attention"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative decoding"),
        ({"disaggregation_mode": SimpleNamespace(value="prefill")}, "disaggregation"),
        ({"dllm_config": object()}, "diffusion"),
        ({"is_generation": False}, "does not generate"),
        ({"chunked_prefill_size": None}, "--chunked-prefill-size -1"),
        ({"is_hybrid_swa": True}, "sliding windows"),
    ],
)
def test_an_engine_that_was_not_tried_is_refused(other, said):
    fit.check_engine(scheduler())
    with pytest.raises(InputError, match=f"{said}.* is not supported; drop it"):
        fit.check_engine(scheduler(**other))


def release(folder: Path, version: str) -> Path:
    """Sources that have all we rely on, and nothing else."""
    texts: dict[str, str] = {}
    for file, classes in seams.METHODS.items():
        for name, methods in classes.items():
            texts[file] = texts.get(file, "") + f"class {name}:\n"
            for method, arguments in methods.items():
                texts[file] += f"    def {method}(self, {', '.join(arguments)}): {_body(file, method)}\n"
    for file, function in seams.READS:
        if f"def {function}(" not in texts.get(file, ""):
            texts[file] = texts.get(file, "") + f"def {function}(): {_body(file, function)}\n"
    for file, words in seams.WORDS.items():
        texts[file] += f"# {' '.join(words)}\n"
    for file, text in {**texts, "version.py": f'__version__ = "{version}"\n'}.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _body(file: str, function: str) -> str:
    return f"return {', '.join(seams.READS.get((file, function), ('None',)))}"


def test_seams_that_hold(tmp_path):
    assert seams.problem(release(tmp_path, "0.5.23")) is None
    assert seams.doubt(tmp_path) is None


def test_an_older_and_a_newer_release(tmp_path):
    assert "older than those headgate knows" in seams.problem(release(tmp_path / "old", "0.5.20"))
    new = release(tmp_path / "new", "0.5.24")
    assert seams.problem(new) is None
    assert "0.5.24 was not tested" in seams.doubt(new)


def test_what_changed_is_named(tmp_path):
    folder = release(tmp_path, "0.5.23")
    file = folder / seams.SCHEDULER
    file.write_text(
        file.read_text().replace("is_mixed_chunk", "other").replace("def abort_request", "def gone")
    )
    said = seams.problem(folder)
    assert "Scheduler lacks abort_request" in said
    assert "_get_new_batch_prefill_raw no longer reads is_mixed_chunk" in said


def test_not_installed():
    assert seams.home() is not None or "not installed" in seams.problem()
