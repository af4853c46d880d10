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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use-ray"], "--use-ray"),
        (["--use-ray", "--tp", "2"], "--use-ray"),
        (["--pp-size", "2"], "--pp-size 2"),
        (["--pipeline_parallel_size=2"], "--pp-size 2"),
        (["--attn-dp-size", "4"], "--attn-dp-size 4"),
        (["--enable-dp-attention", "--dp-size", "4"], "--enable-dp-attention"),
        (["--speculative-algorithm", "EAGLE"], "--speculative-algorithm EAGLE"),
        (["--disaggregation-mode", "prefill"], "--disaggregation-mode prefill"),
        (["--enable-pdmux"], "--enable-pdmux"),
        (["--dllm-algorithm", "LowConfidence"], "--dllm-algorithm LowConfidence"),
        (["--enable-hisparse"], "--enable-hisparse"),
        (["--chunked-prefill-size", "-1"], "--chunked-prefill-size -1"),
    ],
)
def test_settings_that_were_not_tried_are_refused(words, said):
    with pytest.raises(InputError, match=f"^SGLang with {said} is not supported; drop it"):
        fit.check_arguments(fit.arguments(words))


def test_what_was_tried_is_not_refused():
    words = "--pp-size 1 --disaggregation-mode null --tp-size 2 --chunked-prefill-size 8192 --dp-size 2 -q"
    fit.check_arguments(fit.arguments(words.split()))
    fit.check_arguments({**fit.TRIED, "chunked_prefill_size": None})


def scheduler(**other):
    plain = {"require_mlp_sync": False, "is_generation": True, "chunked_prefill_size": 8192}
    return SimpleNamespace(**{**plain, **other})


def test_a_release_that_renamed_what_was_not_tried_is_refused():
    known = {"pp_size": 2, "speculative_algorithm": None, "disaggregation_mode": "null"}
    assert fit.read_arguments(SimpleNamespace(**known)) == known
    del known["pp_size"]
    with pytest.raises(InputError, match=r"no setting pp_size.*use SGLang 0\.5\.22"):
        fit.read_arguments(SimpleNamespace(**known))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"require_mlp_sync": True}, "DP attention"),
        ({"is_generation": False}, "does not generate"),
        ({"chunked_prefill_size": None}, "in one piece"),
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"is_hybrid_ssm": True}, "state space layers"),
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
    assert seams.RELEASES.doubt("0.5.23") is None


def test_an_older_and_a_newer_release(tmp_path):
    assert "older than those headgate knows" in seams.problem(release(tmp_path / "old", "0.5.20"))
    new = release(tmp_path / "new", "0.5.24")
    assert seams.problem(new) is None
    assert "0.5.24 was not tested" in seams.RELEASES.doubt("0.5.24")


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
