import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from hashlib import sha256

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from swarm_node.errors import UserError
from swarm_node.storage.checkpoints import CheckpointStore
from tests.support.disks import file_size_limit
from tests.support.waiting import until

STATE = {
    "model": "starter",
    "round": 1,
    "rng": {"python": [3, [1, 2], None], "big": 2**127 - 1},
    "lr": 0.1 + 0.2,
}


def accept_all(state):
    return None


def save(directory, *rounds, keep=10, state=STATE):
    store = CheckpointStore(directory, keep, print)
    for round in rounds:
        store.save(round, {"policy": {"w": torch.full((64,), float(round))}}, state)
    store.close()


def load(directory, accept=accept_all):
    said = []
    return CheckpointStore(directory, 2, said.append).load_latest(accept), said


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# --- what goes in comes out


def test_roundtrip_of_every_kind_of_tensor(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "policy": {
            "f32": torch.randn(3, 5),
            "bf16": torch.randn(7).bfloat16(),
            "f16": torch.randn(2, 2).half(),
        },
        "optimizer": {
            "step": torch.tensor(12.0),
            "i64": torch.tensor([2**62, -1]),
            "bool": torch.tensor([True, False]),
            "rng": torch.get_rng_state(),
            "empty": torch.empty(0, 4),
            "transposed": torch.randn(4, 6).t(),
            "slice": torch.randn(8, 8)[2:5, ::2],
            "parameter": nn.Parameter(torch.randn(3)),
        },
        "nothing": {},
    }
    store = CheckpointStore(tmp_path / "checkpoints", 2, print)
    store.save(120, tensors, STATE)
    store.close()
    assert names(tmp_path / "checkpoints") == ["round-00000120"]
    checkpoint, said = load(tmp_path / "checkpoints")
    assert said == [] and checkpoint.round == 120 and checkpoint.state == STATE
    assert checkpoint.tensors.keys() == tensors.keys()
    for stem, named in tensors.items():
        assert checkpoint.tensors[stem].keys() == named.keys()
        for name, tensor in named.items():
            loaded = checkpoint.tensors[stem][name]
            assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor), name


def test_tied_weights_are_written_once_and_tied_again(tmp_path):
    embedding, head = nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)
    head.weight = embedding.weight
    store = CheckpointStore(tmp_path, 2, print)
    store.save(1, {"policy": {"embed.weight": embedding.weight, "lm_head.weight": head.weight}}, STATE)
    store.close()
    assert (tmp_path / "round-00000001" / "policy.safetensors").stat().st_size < 1.5 * 100 * 16 * 4
    checkpoint, _ = load(tmp_path)
    policy = checkpoint.tensors["policy"]
    assert policy["lm_head.weight"] is policy["embed.weight"]
    assert torch.equal(policy["lm_head.weight"], head.weight)


def test_views_that_merely_overlap_are_kept_apart(tmp_path):
    flat = torch.arange(10.0)
    tensors = {"all": flat, "head": flat[:4], "tail": flat[6:], "square": flat[:4].view(2, 2)}
    store = CheckpointStore(tmp_path, 2, print)
    store.save(1, {"policy": tensors}, STATE)
    store.close()
    checkpoint, _ = load(tmp_path)
    assert all(torch.equal(checkpoint.tensors["policy"][name], tensor) for name, tensor in tensors.items())


def test_training_goes_on_during_the_write(tmp_path):
    weight, state = torch.zeros(1 << 20), {"counter": 1}
    store = CheckpointStore(tmp_path, 2, print)
    store.save(1, {"policy": {"w": weight}}, state)
    weight.fill_(7)
    state["counter"] = 2
    store.close()
    checkpoint, _ = load(tmp_path)
    assert checkpoint.state == {"counter": 1} and not checkpoint.tensors["policy"]["w"].any()


def test_changing_loaded_tensors_leaves_the_files_alone(tmp_path):
    save(tmp_path, 1)
    load(tmp_path)[0].tensors["policy"]["w"].zero_()
    checkpoint, said = load(tmp_path)
    assert said == [] and checkpoint.tensors["policy"]["w"][0] == 1


def test_state_that_is_not_json_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path, 2, print)
    with pytest.raises(TypeError):
        store.save(1, {}, {"rng": torch.zeros(1)})
    store.close()
    assert names(tmp_path) == []


def test_sums_can_be_checked_by_hand(tmp_path):
    save(tmp_path, 1)
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=tmp_path / "round-00000001", check=True)


# --- order and pruning


def test_newest_wins_and_only_so_many_are_kept(tmp_path):
    save(tmp_path, 8, 9, 10, 100_000_000, keep=2)
    assert names(tmp_path) == ["round-00000010", "round-100000000"]
    assert load(tmp_path)[0].round == 100_000_000


def test_saving_a_round_again_replaces_it(tmp_path):
    save(tmp_path, 5, keep=1)
    save(tmp_path, 5, keep=1, state=STATE | {"finished": True})
    assert names(tmp_path) == ["round-00000005-1"]
    checkpoint, _ = load(tmp_path)
    assert checkpoint.round == 5 and checkpoint.state["finished"]


def test_torn_later_checkpoints_do_not_displace_new_ones(tmp_path):
    save(tmp_path, 10, 20, 30, keep=3)
    for later in (20, 30):
        (tmp_path / f"round-000000{later}" / "policy.safetensors").unlink()
    store = CheckpointStore(tmp_path, 1, print)
    assert store.load_latest(accept_all).round == 10
    store.save(15, {}, STATE)
    store.save(25, {}, STATE)
    store.close()
    assert names(tmp_path) == ["round-00000020", "round-00000025", "round-00000030"]
    assert load(tmp_path)[0].round == 25


def test_nothing_there_is_no_news(tmp_path):
    assert load(tmp_path / "none") == (None, [])


# --- torn


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path):
    path.unlink()


def turn_into_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut, empty, flip, remove, turn_into_directory])
@pytest.mark.parametrize("file", ["policy.safetensors", "state.json", "SHA256SUMS"])
def test_a_torn_checkpoint_gives_way_to_its_predecessor(tmp_path, file, damage):
    save(tmp_path, 1, 2)
    damage(tmp_path / "round-00000002" / file)
    if (file, damage) == ("SHA256SUMS", cut):
        assert load(tmp_path)[0].round == 2  # only the last line break is gone
        cut(tmp_path / "round-00000002" / file)
    checkpoint, said = load(tmp_path)
    assert checkpoint.round == 1 and checkpoint.tensors["policy"]["w"][0] == 1
    assert len(said) == 1 and said[0].startswith("checkpoint round-00000002 refused: ")
    assert names(tmp_path) == ["round-00000001", "round-00000002"]


def test_every_flipped_bit_of_small_files_is_noticed(tmp_path):
    save(tmp_path, 1)
    for file in ("state.json", "SHA256SUMS"):
        path = tmp_path / "round-00000001" / file
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :])
            assert load(tmp_path)[0] is None, (file, position)
        path.write_bytes(whole)
    assert load(tmp_path)[0].round == 1


def test_a_renamed_checkpoint_is_refused(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "round-00000001").rename(tmp_path / "round-00000099")
    assert load(tmp_path)[0] is None


def test_with_all_torn_it_starts_anew(tmp_path):
    save(tmp_path, 1, 2)
    for round in (1, 2):
        empty(tmp_path / f"round-0000000{round}" / "SHA256SUMS")
    checkpoint, said = load(tmp_path)
    assert checkpoint is None and len(said) == 2 and all(" refused: " in text for text in said)
    assert names(tmp_path) == ["round-00000001", "round-00000002"]


FRESH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
"""Each example clears what it uses of a fixture, and a busy machine is slow."""
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "format": st.just(1) | json_values,
        "round": st.just(1) | json_values,
        "files": st.just(["policy"]) | json_values,
        "state": st.just({}) | json_values,
    },
).map(lambda document: json.dumps(document).encode())


@given(
    state=st.binary(max_size=50) | json_values.map(lambda v: json.dumps(v).encode()) | documents,
    tensors=st.binary(),
)
@settings(max_examples=150, suppress_health_check=FRESH)
def test_any_bytes_with_right_digests_load_or_fail(tmp_path, state, tensors):
    shutil.rmtree(tmp_path)
    folder = tmp_path / "round-00000001"
    folder.mkdir(parents=True)
    (folder / "state.json").write_bytes(state)
    (folder / "policy.safetensors").write_bytes(tensors)
    sums = sums_of(folder)
    (folder / "SHA256SUMS").write_text(sums)
    try:
        checkpoint, _ = load(tmp_path)
    except UserError as error:
        assert "format" in str(error)
    else:
        assert checkpoint is None or set(checkpoint.tensors) == set()


def sums_of(folder):
    return "".join(f"{sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir()))


# --- foreign


def of_this_model(state):
    return None if state["model"] == "starter" else f"it holds model {state['model']}, not starter"


def test_another_models_run_directory_is_refused(tmp_path):
    save(tmp_path / "checkpoints", 1, 2, state={"model": "qwen"})
    with pytest.raises(UserError, match=r"another run: it holds model qwen, not starter; choose another --run-dir"):
        load(tmp_path / "checkpoints", of_this_model)
    assert names(tmp_path / "checkpoints") == ["round-00000001", "round-00000002"]


def test_foreign_and_torn_together_do_not_start_anew(tmp_path):
    save(tmp_path, 1, 2, state={"model": "qwen"})
    empty(tmp_path / "round-00000002" / "SHA256SUMS")
    with pytest.raises(UserError, match="qwen"):
        load(tmp_path, of_this_model)


def test_a_foreign_checkpoint_among_ours_is_kept(tmp_path):
    save(tmp_path, 7)
    save(tmp_path, 8, state={"model": "qwen"})
    said = []
    store = CheckpointStore(tmp_path, 1, said.append)
    assert store.load_latest(of_this_model).round == 7
    assert said == ["checkpoint round-00000008 refused: it holds model qwen, not starter"]
    store.save(9, {}, STATE)
    store.close()
    assert names(tmp_path) == ["round-00000008", "round-00000009"]


# --- trouble while writing


def test_a_full_disk_costs_no_good_checkpoint(tmp_path):
    said = []
    store = CheckpointStore(tmp_path, 2, said.append)
    big = {"policy": {"w": torch.ones(100_000)}}
    store.save(10, big, STATE)
    store.wait()
    with file_size_limit(200_000):
        store.save(20, big, STATE)
        store.save(30, big, STATE)
        store.wait()
    assert len(said) == 1 and store.failure.startswith("checkpoint of round 30: disk full")
    assert "checkpoint of round 20: disk full" in said[0] and "last good checkpoint: round 10" in said[0]
    assert names(tmp_path) == ["round-00000010"]
    with pytest.raises(UserError, match=r"round 30: disk full.*last good checkpoint: round 10"):
        store.close()
    assert load(tmp_path)[0].round == 10


def test_writes_that_go_on_failing_are_said_again(tmp_path, monkeypatch):
    said = []
    store = CheckpointStore(tmp_path, 2, said.append)
    monkeypatch.setattr("swarm_node.storage.checkpoints.WARN_AGAIN_S", 0.0)
    with file_size_limit(100):
        store.save(1, {}, STATE)
        store.save(2, {}, STATE)
        store.wait()
    assert [text.partition(":")[0] for text in said] == ["checkpoint of round 1", "checkpoint of round 2"]


def test_a_disk_that_has_room_again_heals(tmp_path):
    said, began = [], time.monotonic()
    store = CheckpointStore(tmp_path, 2, said.append)
    with file_size_limit(100):
        store.save(1, {}, STATE)
        store.wait()
    assert "last good checkpoint: none yet" in said[0]
    assert names(tmp_path) == []
    failed_for = store.age_s
    store.save(2, {}, STATE)
    store.close()
    assert said[1:] == ["checkpoints are written again: round 2 is saved"]
    assert 0 <= store.age_s and store._good_at - began >= failed_for
    assert load(tmp_path)[0].round == 2


def test_a_really_full_file_system(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        said = []
        store = CheckpointStore(tmp_path / "checkpoints", 2, said.append)
        for round in (1, 2, 3):
            store.save(round, {"policy": {"w": torch.ones(100_000)}}, STATE)
        with pytest.raises(UserError, match=r"round 3: disk full.*last good checkpoint: round 2"):
            store.close()
        assert len(said) == 1 and load(tmp_path / "checkpoints")[0].round == 2
    finally:
        subprocess.run(["umount", tmp_path], check=True)


SAVE_FOR_EVER = """
import sys, torch
from pathlib import Path
from swarm_node.storage.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), 2, print)
for round in range(1, 10_000):
    store.save(round, {"policy": {"w": torch.full((1 << 22,), float(round))}}, {"model": "starter"})
"""


@contextmanager
def saving_process(directory):
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(directory)])
    try:
        until(lambda: any(directory.glob("round-0*")) or process.poll() is not None, 100.0)
        assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait()


def test_kill_9_in_the_middle_of_a_write(tmp_path):
    with saving_process(tmp_path) as process:
        deadline = time.monotonic() + 100
        while not any(tmp_path.glob(".tmp-*/policy.safetensors")):  # looked at while it stands still
            assert process.poll() is None and time.monotonic() < deadline
            process.send_signal(signal.SIGCONT)
            time.sleep(0.003)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED)
    assert any(tmp_path.glob(".tmp-*"))
    checkpoint, said = load(tmp_path)
    assert said == [] and checkpoint.round >= 1
    assert (checkpoint.tensors["policy"]["w"] == checkpoint.round).all()
    save(tmp_path, checkpoint.round + 1, keep=1)
    assert names(tmp_path) == [f"round-{checkpoint.round + 1:08}"]


def test_checkpoints_load_during_saving_and_pruning(tmp_path):
    with saving_process(tmp_path):
        seen = [load(tmp_path)[0].round for _ in range(10)]
    assert seen == sorted(seen)
