"""The real thing: `k3ray generate` as a process, on Ray actors, against the golden; and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from k3ray.api import open_model
from k3ray.cluster.actor_chain import ActorChain
from k3ray.cluster.plan import make_plan
from k3ray.cluster.ray_runtime import RaySettings, ray_runtime
from k3ray.driver import Driver
from k3ray.proof import logits_hash, trace
from k3ray.selfcheck import EMBEDDED_LOGITS, GEN, prompt_ids
from k3ray.state_file import open_state
from k3ray.workers.checkpoint.index import open_index
from k3ray.workers.in_process import start_in_process
from k3ray.workers.loading import CheckpointSpec
from k3ray.workers.model.config import read_config
from tests.goldens import read_golden

pytestmark = pytest.mark.ray
COMMAND = [sys.executable, "-c", "from k3ray.cli import main; main()"]
TIMEOUT_S = 120
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def clean_machine(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose processes can be recognised; after the test none of them, and no shared memory, is left."""
    mark = f"k3ray-test-{os.getpid()}-{os.urandom(4).hex()}"
    before = set(SHARED_MEMORY.iterdir())
    variables = {name: text for name, text in os.environ.items() if not name.startswith(("K3_", "RAY_", "OMP_"))}
    yield {**variables, "K3RAY_TEST_MARK": mark, "RAY_ADDRESS": "local", "XDG_STATE_HOME": str(tmp_path / "state")}
    left = [process for process in psutil.process_iter() if _is_marked(process, mark)]
    _, alive = psutil.wait_procs(left, timeout=15)
    assert not [" ".join(process.cmdline()) for process in alive]
    assert not [path.name for path in SHARED_MEMORY.iterdir() if path not in before and "k3ray" in path.name]


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("K3RAY_TEST_MARK") == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def generate(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "generate", *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert "Traceback" not in found.stderr, found.stderr
    return found


def interrupted(arguments: list[str], environment: dict[str, str]) -> str:
    """What a run says that gets Ctrl-C while its tokens come."""
    command = [*COMMAND, "generate", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(4)  # tokens are coming
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    return errors


def test_golden_ids_over_stages_and_shards(k3b_dir: Path, tmp_path: Path, clean_machine: dict[str, str]) -> None:
    golden = read_golden(k3b_dir)
    out, logits_file = tmp_path / "run.json", tmp_path / "logits"
    ids = ",".join(map(str, golden.ids(2)))
    options = ["--ids", ids, "--gen", "32", "--ignore-eos", "--stages", "3", "--expert-shards", "2"]
    found = generate([str(k3b_dir), *options, "--out", str(out), "--dump-logits", str(logits_file)], clean_machine)
    assert found.returncode == 0, found.stderr
    record = json.loads(out.read_text())
    assert record["generated_ids"] == golden.arrays["p2_greedy"].tolist()
    assert record["prompt_ids"] == golden.ids(2) and record["full_ids"] == golden.ids(2) + record["generated_ids"]
    assert len(record["step_seconds"]) == 32 and record["layers"] == 9 and record["peak_memory_bytes"] > 10**8
    assert record["settings"]["stages"] == 3 and record["settings"]["expert_shards"] == 2
    assert {"python", "k3ray", "ray", "numpy", "numba"} <= record["versions"].keys()
    assert found.stdout.rstrip("\n") == record["text"]
    logits = np.fromfile(logits_file, "<f4")
    assert np.abs(logits - golden.arrays["p2_greedy_logits"][0]).max() < 2e-3
    lines = found.stderr.splitlines()
    assert (
        lines[0].startswith(f"model: {k3b_dir}")
        and lines[1].startswith("memory: ")
        and lines[2].startswith("Ray: started its own")
    )
    assert lines[-1].startswith("done: 32 tokens")


def test_it_stops_after_an_end_of_message_id(k3b_dir: Path, tmp_path: Path, clean_machine: dict[str, str]) -> None:
    copy = tmp_path / "model"
    shutil.copytree(k3b_dir, copy, ignore=shutil.ignore_patterns("golden.*"))
    golden = read_golden(k3b_dir)
    end = int(golden.arrays["p2_greedy"][3])
    config = json.loads((copy / "config.json").read_text())
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = end
    (copy / "config.json").write_text(json.dumps(config))
    out = tmp_path / "run.json"
    found = generate([str(copy), "--ids", ",".join(map(str, golden.ids(2))), "--out", str(out)], clean_machine)
    assert found.returncode == 0, found.stderr
    record = json.loads(out.read_text())
    assert record["generated_ids"] == golden.arrays["p2_greedy"][:4].tolist()
    assert record["stop_reason"] == "end of message"


def test_damage_ends_with_its_exit_code(k3b_dir: Path, tmp_path: Path, clean_machine: dict[str, str]) -> None:
    copy = tmp_path / "model"
    shutil.copytree(k3b_dir, copy, ignore=shutil.ignore_patterns("golden.*"))
    index = open_index(copy)
    for expert in range(16):
        entry = index.find(f"language_model.model.layers.2.block_sparse_moe.experts.{expert}.w2.weight_scale")
        assert entry is not None
        with entry.path.open("r+b") as file:
            file.seek(entry.offset)
            file.write(b"\xff")
    found = generate([str(copy), "--ids", "3,5", "--gen", "2", "--expert-shards", "2"], clean_machine)
    assert found.returncode == 4 and "NaN scale bytes in layer 2 expert" in found.stderr
    matrix = open_index(copy).find("language_model.model.layers.4.self_attn.o_proj.weight")
    assert matrix is not None
    with matrix.path.open("r+b") as file:
        file.seek(matrix.offset)
        file.write(b"\xc0\x7f")
    found = generate([str(copy), "--ids", "3,5", "--gen", "2", "--stages", "2"], clean_machine)
    assert found.returncode == 1 and "layer 4 (KDA attention), position 0" in found.stderr and not found.stdout


def test_an_expert_that_becomes_unreadable_ends_with_4_and_keeps_what_was_generated(
    k3b_dir: Path, tmp_path: Path, clean_machine: dict[str, str]
) -> None:
    copy, out = tmp_path / "model", tmp_path / "run.json"
    shutil.copytree(k3b_dir, copy, ignore=shutil.ignore_patterns("golden.*"))
    options = ["--ids", "3,5,7", "--gen", "4000", "--ignore-eos", "--trunk-gb", "auto", "--cache-gb", "0"]
    arguments = [*COMMAND, "generate", str(copy), *options, "--out", str(out)]
    process = subprocess.Popen(arguments, env=clean_machine, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(20)  # tokens are coming
    os.truncate(copy / "model-00003-of-000005.safetensors", 1000)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 4 and "Traceback" not in errors
    assert "could not be read in 3 tries" in errors and "model-00003-of-000005.safetensors" in errors
    record = json.loads(out.read_text())
    assert record["stop_reason"].startswith("stopped: layer ") and 0 < len(record["generated_ids"]) < 4000


def test_ctrl_c_leaves_nothing_but_what_was_generated(
    k3b_dir: Path, tmp_path: Path, clean_machine: dict[str, str]
) -> None:
    out = tmp_path / "run.json"
    options = ["--ids", "3,5,7", "--gen", "4000", "--ignore-eos", "--stages", "2", "--out", str(out)]
    errors = interrupted([str(k3b_dir), *options], clean_machine)
    assert "interrupted" in errors
    record = json.loads(out.read_text())
    assert record["stop_reason"] == "stopped: interrupted" and 0 < len(record["generated_ids"]) < 4000


def test_a_state_saved_over_stages_and_shards_goes_on_in_one_process(
    k3b_dir: Path, tmp_path: Path, clean_machine: dict[str, str]
) -> None:
    golden = read_golden(k3b_dir)
    expected = golden.arrays["p2_greedy"].tolist()
    state, out = tmp_path / "state", tmp_path / "run.json"
    ids = ",".join(map(str, golden.ids(2)))
    begin = ["--ids", ids, "--gen", "13", "--stages", "3", "--expert-shards", "2", "--save-state", str(state)]
    found = generate([str(k3b_dir), *begin, "--ignore-eos"], clean_machine)
    assert found.returncode == 0, found.stderr
    assert f"saved: {state}, {len(golden.ids(2)) + 13} ids" in found.stderr
    go_on = ["--load-state", str(state), "--save-state", str(state), "--gen", "19", "--out", str(out), "--ignore-eos"]
    found = generate([str(k3b_dir), *go_on], clean_machine)
    assert found.returncode == 0, found.stderr
    record = json.loads(out.read_text())
    assert record["generated_ids"] == expected[13:32] and record["full_ids"] == golden.ids(2) + expected[:32]
    assert record["settings"]["load_state"] == str(state)
    found = generate([str(k3b_dir), "--load-state", str(state), "--layers", "4"], clean_machine)
    assert found.returncode == 2 and "give --layers 9" in found.stderr


def test_ctrl_c_saves_a_state_that_goes_on(k3b_dir: Path, tmp_path: Path, clean_machine: dict[str, str]) -> None:
    state, out = tmp_path / "state", tmp_path / "run.json"
    options = ["--ids", "3,5,7", "--gen", "4000", "--ignore-eos", "--stages", "2", "--save-state", str(state)]
    errors = interrupted([str(k3b_dir), *options], clean_machine)
    assert "need not be run again" in errors, errors
    document = open_state(state).document
    done = len(document.generated_ids)
    assert document.prompt_ids == [3, 5, 7] and document.num_committed >= 3 + done - 1
    with_state = generate(
        [str(k3b_dir), "--load-state", str(state), "--gen", "3", "--ignore-eos", "--out", str(out)], clean_machine
    )
    assert with_state.returncode == 0, with_state.stderr
    resumed = json.loads(out.read_text())["full_ids"]
    whole = [str(k3b_dir), "--ids", "3,5,7", "--gen", str(done + 3), "--ignore-eos", "--out", str(out)]
    assert generate(whole, clean_machine).returncode == 0
    assert resumed == json.loads(out.read_text())["full_ids"]


def test_the_python_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    pieces: list[str] = []
    with open_model() as model:
        first = model.generate(prompt="The small model", gen=4, on_token=lambda token: pieces.append(token.text))
        again = model.generate(ids=first.prompt_ids, gen=4, incremental=False)
        streamed = [token.token_id for token in model.stream("The small model", gen=4)]
    assert first.generated_ids == again.generated_ids == streamed
    assert "".join(pieces) == first.text and first.first_logits.tobytes() == again.first_logits.tobytes()


def test_one_hash_on_actors(k3b_dir: Path) -> None:
    spec = CheckpointSpec(k3b_dir, None, read_config(k3b_dir).num_hidden_layers)
    alone = make_plan(spec, 1, 0, 1, ())
    prompt, companions = [84, 197, 179, 385, 423], [[5], [9, 9, 9]]
    expected = logits_hash(trace(Driver(start_in_process(alone.stages, alone.shards)), prompt, 3)[1])
    with ray_runtime(RaySettings("local", workers=10)) as runtime:
        chain = ActorChain(make_plan(spec, 7, 3, 1, ()), runtime.actor_options)
        try:
            for stages, shards, threads in ((7, 3, 10), (1, 0, 2), (5, 1, 6), (2, 3, 10), (3, 0, 3)):
                chain.load(make_plan(spec, stages, shards, threads, (0, 1)))
                for chunk, incremental in ((2, True), (64, False)):
                    found = trace(Driver(chain, chunk), prompt, 3, companions, incremental)[1]
                    assert logits_hash(found) == expected, (stages, shards, threads, chunk, incremental)
        finally:
            chain.stop()


def test_the_recorded_bits_of_the_embedded_model() -> None:
    with open_model() as model:
        checkpoint = model.plan.stages[0].checkpoint
    plan = make_plan(checkpoint, 1, 0, 1, ())
    driver = Driver(start_in_process(plan.stages, plan.shards))
    _, logits = trace(driver, prompt_ids(read_config(checkpoint.model_dir).vocab_size), GEN)
    assert logits_hash(logits) == EMBEDDED_LOGITS
