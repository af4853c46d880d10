"""What `headgate serve --dry-run` says and refuses before any engine is there."""

CARD = ("--card", "cal-h200-qwen3-8b")


def test_a_card_of_another_model_is_refused(headgate, refused):
    for model in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-4B"):
        refused(["serve", model, *CARD, "--dry-run"], "is of another model (Qwen3-8B)", "--any-card")
    assert headgate("serve", "Qwen/Qwen3-4B", *CARD, "--any-card", "--dry-run").code == 0


def test_a_card_of_another_number_of_gpus_is_refused(headgate, refused):
    line = ["serve", "meta-llama/Llama-3.1-70B", "--card", "derived:llama-3.1-70b@h100-sxm:tp2", "--dry-run"]
    said = "is of tensor parallel 2, this engine would have 1; give --tensor-parallel-size 2"
    refused(line, said)
    refused([*line, "-tp", "4"], "this engine would have 4")
    refused(
        ["serve", "Qwen/Qwen3-8B", *CARD, "--tensor-parallel-size=2", "--dry-run"], "is of tensor parallel 1"
    )
    for right in (
        ("--tensor_parallel_size=2",),
        ("-tp", "2"),
        ("--any-card",),
        ("--", "--config", "vllm.yaml"),
    ):
        assert headgate(*line, *right).code == 0, right


def test_the_policy_is_named(headgate):
    said = headgate("serve", "Qwen/Qwen3-8B", *CARD, "--ttft", "500ms", "--dry-run")
    assert "policy keep (auto), step times of card cal-h200-qwen3-8b" in said.out
    said = headgate("serve", "Qwen/Qwen3-8B", *CARD, "--policy", "eb:refill=48", "--dry-run")
    assert "policy eb with refill=48, step times of card" in said.out


def test_the_first_line_says_what_it_rests_on(headgate):
    flags = ("--max-num-seqs", 512, "--max_num_batched_tokens=2048", "--no-async-scheduling")
    first = headgate("serve", "Qwen/Qwen3-8B", *CARD, *flags, "--dry-run").out.splitlines()[0]
    assert "(Qwen3-8B on NVIDIA H200)" in first and "max-num-seqs 512, max-num-batched-tokens 2048" in first
    assert "max-model-len as vLLM chooses, scheduling synchronous" in first
    first = headgate("serve", "Qwen/Qwen3-8B", *CARD, "--dry-run").out.splitlines()[0]
    assert first.endswith("scheduling asynchronous where vLLM can")


def test_without_a_card_it_serves_and_says_how_to_calibrate(headgate):
    said = headgate("serve", "some/model", "--dry-run")
    assert said.code == 0
    assert "no card: it learns step times while it serves; headgate calibrate some/model" in said.out


def test_what_happens_where_nothing_is_promised_is_said(headgate):
    def said(*flags):
        return headgate("serve", "some/model", *flags, "--dry-run").out

    assert "nothing is promised (--ttft, --tbt): keep schedules as eb+, no promise is counted" in said()
    assert "(--ttft, --tbt): no promise is counted" in said("--policy", "mixed")
    assert "keep schedules as eb+" in said("--engine", "sglang")
    assert "nothing is promised" not in said("--ttft", "1s") + said("--tbt", "100ms")


def test_flags_that_are_nearly_ours_are_told_of(headgate):
    def said(*flags):
        return headgate("serve", "some/model", *flags, "--dry-run").out

    assert "--TTFT is not ours and goes to vllm; did you mean --ttft?" in said("--TTFT", "1s")
    assert "--slo is not ours and goes to vllm; did you mean --ttft and --tbt?" in said("--slo", "ttft=1s")
    shown = " ".join(headgate("serve", "--help").out.split())
    assert "(default: on) (default: yes)" not in shown


def test_refuse_with_a_policy_that_ignores_it(headgate, refused):
    refused(
        ["serve", "m", "--policy", "mixed", "--refuse", "503", "--dry-run"], "policy mixed refuses nothing"
    )
    refused(["serve", "m", "--policy", "vllm", "--refuse", "503", "--dry-run"], "refuses nothing")
    assert headgate("serve", "m", "--refuse", "503", "--dry-run").code == 0


def test_larger_graphs_are_named_where_gaps_are_promised(headgate):
    def hint(*flags):
        said = headgate("serve", "Qwen/Qwen3-8B", *CARD, *flags, "--dry-run").out
        return [line for line in said.splitlines() if "--max-cudagraph-capture-size" in line]

    assert not hint("--ttft", "500ms")
    assert "--max-cudagraph-capture-size 4096" in hint("--tbt", "100ms")[0]
    assert "--max-cudagraph-capture-size 2560" in hint("--tbt", "100ms", "--max-num-batched-tokens", 2545)[0]
    for own in ("--enforce-eager", "-O=2", "--compilation_config={}"):
        assert not hint("--tbt", "100ms", own)


def test_what_priorities_mean_beside_promises_is_said(headgate):
    def said(*flags):
        out = headgate("serve", "Qwen/Qwen3-8B", *CARD, *flags, "--dry-run").out
        return [line for line in out.splitlines() if "before priorities" in line]

    by_priority = ("--scheduling-policy", "priority")
    assert "--policy slai:order=priority" in said("--ttft", "500ms", *by_priority)[0]
    assert said("--ttft", "500ms", "--scheduling_policy=priority")
    assert not said("--ttft", "500ms")
    assert not said("--tbt", "100ms", *by_priority), "without such a promise priorities are followed"
    assert not said("--ttft", "500ms", "--policy", "slai", *by_priority)


def test_a_flag_that_is_nearly_ours_is_said(headgate):
    said = headgate("serve", "Qwen/Qwen3-8B", "--tftt", "500ms", "--max-num-seqs", 64, "--dry-run")
    line = "headgate: --tftt is not ours and goes to vllm; did you mean --ttft?"
    assert said.out.splitlines()[0] == line and not said.err
    assert "vllm serve Qwen/Qwen3-8B --tftt 500ms --max-num-seqs 64" in said.out


def test_all_mistakes_of_a_settings_file_are_told_up_to_three(refused, tmp_path):
    (tmp_path / "s.toml").write_text('polcy = "x"\nttft = "soon"\ntbt = "later"\n')
    three = ["'polcy'; did you mean 'policy'?", "ttft: 'soon' is not a duration", "tbt: 'later' is not"]
    refused(["serve", "m", "--config", "s.toml", "--dry-run"], *three)
