"""Steps are explained and linted for a GPU that this machine need not have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mstpass
from mstpass import gpus
from mstpass.cli.main import main
from mstpass.errors import UserError
from mstpass.torch_internals.pretended_gpu import is_pretended
from mstpass.tracing.devices import traced_for
from mstpass.tracing.joint_graphs import trace_one_graph

pytestmark = pytest.mark.sampled(8)

TOKENS, WIDTH, VOCABULARY = 8192, 256, 32000


class Model(nn.Module):
    def __init__(self, masked: bool = False):
        super().__init__()
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.masked = masked

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, TOKENS, 4, 192).transpose(1, 2).chunk(3, -1)
        mask = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool, device=x.device)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask if self.masked else None, is_causal=not self.masked
        )
        hidden = x + attended.transpose(1, 2).reshape(TOKENS, WIDTH)
        return F.cross_entropy(self.head(hidden).float(), labels)


def _step(
    masked: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.device("meta"):
        model = Model(masked).to(dtype)
        return model, torch.empty(TOKENS, WIDTH, dtype=dtype), torch.empty(TOKENS).long()


def _attention(gpu: str, masked: bool, dtype: torch.dtype) -> set[str]:
    model, *inputs = _step(masked, dtype)
    with traced_for("cuda", gpu) as device:
        return trace_one_graph(
            model,
            inputs,
            {},
            lambda joint, _: {
                str(node.target).split(".")[1]
                for node in joint.graph.nodes
                if "attention" in str(node.target)
            },
            device=device,
        )


@pytest.mark.parametrize(
    ("gpu", "masked", "dtype", "kernel"),
    [
        ("h100", False, torch.bfloat16, "cudnn"),
        ("h100", True, torch.bfloat16, "cudnn"),
        ("a100", False, torch.bfloat16, "flash"),
        ("a100", True, torch.bfloat16, "efficient"),
        ("4090", False, torch.float32, "efficient"),
    ],
)
def test_attention_is_that_of_the_gpu(
    gpu: str, masked: bool, dtype: torch.dtype, kernel: str
) -> None:
    name = f"_scaled_dot_product_{kernel}_attention"
    assert _attention(gpu, masked, dtype) == {name, f"{name}_backward"}


def test_a_step_without_a_gpu_is_explained_for_one() -> None:
    report = mstpass.explain(*_step(), device="cuda", gpu="h100")
    (region,) = report.regions
    assert region.kind == "lm_head"
    assert not is_pretended()


def test_everything_is_as_before() -> None:
    model = nn.Linear(8, VOCABULARY)
    x = torch.randn(TOKENS, 8, requires_grad=True)
    available, weight = torch.cuda.is_available(), model.weight

    def loss(x: Tensor) -> Tensor:
        value = model(x)
        assert value.device.type == "cuda"
        return value.square().mean()

    mstpass.explain(loss, x, gpu="a100")
    assert model.weight is weight and weight.grad is None and x.grad is None
    assert torch.cuda.is_available() == available
    torch.ones(2, requires_grad=True).sum().backward()


def test_graphs_between_breaks_run_on_the_pretended_gpu() -> None:
    model, *inputs = _step()

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return model(x, labels)

    reports = mstpass.explain_all(loss, *inputs, device="cuda", gpu="a100")
    assert [len(report.regions) for report in reports] == [1]


def test_a_step_may_begin_with_a_tensor_of_no_elements() -> None:
    """As the cache of keys and values, which models of transformers make by default."""
    model, *inputs = _step()

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        rows = torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), x[0]])
        return model(x + rows, labels)

    assert mstpass.explain(loss, *inputs, device="cuda", gpu="a100").regions


def test_auto_is_the_memory_of_the_pretended_gpu() -> None:
    """No budget of 80 GiB keeps the plan from being the free one."""
    reports = [
        mstpass.explain(*_step(), device="cuda", gpu="h100", options={"memory_budget": budget})
        for budget in ("auto", "free")
    ]
    assert reports[0].regions == reports[1].regions


@pytest.mark.parametrize(
    ("device", "gpu", "message"),
    [
        ("gpu9", None, "'gpu9' is not a device"),
        ("cpu", "h100", "the device is cpu"),
        ("meta", None, "tensors on meta stand for"),
        ("cuda", "h1000", "did you mean 'h100'"),
    ],
)
def test_bad_devices(device: str, gpu: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mstpass.explain(*_step(), device=device, gpu=gpu)


_FILE = """
import torch
import torch.nn.functional as F

assert torch.cuda.is_available()
head = torch.nn.Linear(256, 32000, bias=False).cuda().bfloat16()
x = torch.randn(8192, 256, device="cuda").to("cuda:0", torch.bfloat16)
labels = torch.zeros(8192, dtype=torch.long).to(device=torch.device("cuda"))

def loss():
    return F.cross_entropy(head(x).float(), labels)
"""


def test_a_file_for_cuda_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.py"
    file.write_text(_FILE)
    assert main(["explain", f"{file}:loss", "--device", "cuda", "--gpu", "h100"]) == 0
    assert "lm_head" in capsys.readouterr().out
    assert main(["lint", f"{file}:loss", "--gpu", "h100"]) == 0


def test_an_unknown_gpu_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "train.py:loss", "--gpu", "h10"])
    assert "did you mean" in capsys.readouterr().err


def test_a_gpu_and_another_device_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "train.py:loss", "--gpu", "h100", "--device", "cpu"]) == 2
    assert "the device is cpu" in capsys.readouterr().err


def test_lint_for_a_gpu_computes_nothing() -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    found = mstpass.lint(lambda: model(x).sum(), device="cuda", gpu="a100")
    assert not found.findings
    assert model.weight.grad is None


def test_every_kind_can_be_pretended() -> None:
    for kind in gpus.GPUS.values():
        with traced_for("cuda", kind.name):
            assert torch.cuda.get_device_name() == kind.full_name
            assert torch.cuda.mem_get_info()[1] == kind.memory_bytes


_MAKES_ITS_OWN = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

V, D, N = 32000, 64, 4096
device = "cuda" if torch.cuda.is_available() else "cpu"

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(N, D)
        self.head = nn.Linear(D, V, bias=False)
        self.register_buffer("scale", torch.ones(D))
        self.inverse = 1.0 / torch.arange(1, D + 1)  # no buffer, but an attribute

    def forward(self, ids, labels):
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[-1]))
        logits = self.head(hidden * self.scale * self.inverse)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

model = Model()
loader = torch.utils.data.DataLoader(torch.randint(V, (4, N)), batch_size=1)
batch = next(iter(loader))  # reads a value

def batch_inside():
    ids = torch.randint(V, (1, N))
    return model(ids, ids) * torch.tensor(2.0) + torch.tensor([0.5, 1.0])[0]

def of_a_loader():
    return model(batch, batch)

def of_numpy():
    ids, labels = np.zeros((1, N), np.int64), np.ones((1, N), np.int64)
    return model(torch.from_numpy(ids), torch.as_tensor(labels))

def model_inside():
    own = Model().to(device, torch.bfloat16)
    ids = torch.randint(V, (1, N), device=device)
    return own(ids, ids)

def between_graphs():
    ids = torch.zeros(1, N, dtype=torch.long)
    torch._dynamo.graph_break()
    return model(ids, torch.zeros_like(ids))

def on_the_cpu():
    ids = torch.randint(V, (1, N), device="cpu")
    return model(ids, ids)
"""


@pytest.fixture
def file_of_steps(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_MAKES_ITS_OWN)
    return tmp_path / "train.py"


@pytest.mark.parametrize(
    "step", ["batch_inside", "of_a_loader", "of_numpy", "model_inside", "between_graphs"]
)
def test_steps_that_make_their_own_tensors(
    step: str, file_of_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{file_of_steps}:{step}", "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "lm_head" in shown and "not explained" not in shown
    assert torch.from_numpy(np.ones(1)).device.type == "cpu" and not is_pretended()


def test_tensors_on_the_cpu_are_refused_with_what_to_do(
    file_of_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{file_of_steps}:on_the_cpu", "--gpu", "h100"]) == 1
    message = capsys.readouterr().err
    assert "same device" in message and "leave device='cpu' and .cpu() out of it" in message


def test_the_same_from_python() -> None:
    head = nn.Linear(WIDTH, VOCABULARY)

    def loss() -> Tensor:
        return F.cross_entropy(head(torch.randn(TOKENS, WIDTH)), torch.zeros(TOKENS).long())

    (region,) = mstpass.explain(loss, gpu="a100").regions
    assert region.kind == "lm_head"
    assert head.weight.device.type == "cpu" and torch.zeros(1).device.type == "cpu"
