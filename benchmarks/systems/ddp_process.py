"""One process of PyTorch's DistributedDataParallel over gloo, on the CPU: `ddp.py` starts it, and asks for each step.

    python -I ddp_process.py --rank 0 --world 2 --store m0:12400

Needs PyTorch and numpy, and knows nothing of JAX or hapsynth. The models are those of `runtime.py`, as one writes them
in PyTorch, and so is the training step; chosen for speed are fused attention, one matmul for queries, keys and values,
channels-last convolutions, the fused AdamW, tokens put in their experts' queues by index, and gradients that stay in
DDP's buckets. Not compiled: `torch.compile` spared 0 to 6 % of one process's step, and needs a C++ compiler. The state
comes and goes as the arrays that JAX has, by the names that they have there.

Asked, in lines of standard input: `place FILE` (an .npz file of the state, of this process's rows of the batch, and of
their share in all), `tune`, `step`, `values FILE` (where the state is to go). Answers each with a line: the size of
buckets in MB, the loss, or `ok`.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

# The project's own environment has no PyTorch, and its checkers are to pass there.
torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
nn: Any = torch.nn
F: Any = importlib.import_module("torch.nn.functional")
Tensor = Any

LEARNING_RATE, WEIGHT_DECAY, CLIPPED_TO = 1e-3, 1e-2, 1.0
"""As `models.training_step`."""
CAPACITY = 1.25
"""As `models.Transformer`: places in the experts' queues, for each that a token asks for."""
BUCKET_MB = 25
"""Of gradients that travel together: DistributedDataParallel's own."""
TUNED_MB, TRIED = (BUCKET_MB, 4, 1), 2
"""What else may be faster, and steps of each, after a first one that finds the order of gradients."""
Views = dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]
"""Name of an array of JAX's -> the parameter that it is (a part of), and that as a view which lies as JAX has it."""


def whole(x: Tensor) -> Tensor:
    return x


def dense(name: str, layer: Any) -> Views:
    return {f"{name}.kernel": (layer.weight, lambda w: w.T), f"{name}.bias": (layer.bias, whole)}


def norm(name: str, layer: Any) -> Views:
    return {f"{name}.scale": (layer.weight, whole), f"{name}.bias": (layer.bias, whole)}


def under(name: str, views: Views) -> Views:
    return {f"{name}.{key}": view for key, view in views.items()}


class Perceptron(nn.Module):
    def __init__(self, width: int, classes: int, layers: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.hidden:
            x = F.silu(layer(x))
        return F.cross_entropy(self.head(x), y)

    def views(self) -> Views:
        views = dense("head", self.head)
        for i, layer in enumerate(self.hidden):
            views |= dense(f"dense{i}", layer)
        return views


class ConvNet(nn.Module):
    """`channels`: of the input, and out of each convolution; pooled where the next ones have more, and last."""

    def __init__(self, channels: list[int], widths: list[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(channels))
        self.fulls = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.pooled = [a != b for a, b in zip(channels[1:], [*channels[2:], 0])]

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        # Channels are last in memory as the images come, and stay so.
        x = image.permute(0, 3, 1, 2)
        for conv, pooled in zip(self.convs, self.pooled):
            x = F.silu(conv(x))
            if pooled:
                x = F.avg_pool2d(x, 2)
        x = x.permute(0, 2, 3, 1).flatten(1)
        for full in self.fulls[:-1]:
            x = F.silu(full(x))
        return F.cross_entropy(self.fulls[-1](x), label)

    def views(self) -> Views:
        views: Views = {}
        for i, conv in enumerate(self.convs):
            views[f"conv{i}.kernel"] = conv.weight, lambda w: w.permute(2, 3, 1, 0)
            views[f"conv{i}.bias"] = conv.bias, whole
        for i, full in enumerate(self.fulls):
            views |= dense(f"dense{i}", full)
        return views


class Attention(nn.Module):
    """Multi-head, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def views(self) -> Views:
        apart = (self.heads, self.width // self.heads)
        views: Views = {"out.kernel": (self.out.weight, lambda w: w.T.unflatten(0, apart))}
        views["out.bias"] = self.out.bias, whole
        for i, name in enumerate(("query", "key", "value")):
            part = slice(i * self.width, (i + 1) * self.width)
            views[f"{name}.kernel"] = self.qkv.weight, lambda w, part=part: w[part].T.unflatten(1, apart)
            views[f"{name}.bias"] = self.qkv.bias, lambda b, part=part: b[part].unflatten(0, apart)
        return views


class FeedForward(nn.Module):
    def __init__(self, width: int, ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, ff)
        self.down = nn.Linear(ff, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def views(self) -> Views:
        return dense("up", self.up) | dense("down", self.down)


class Mixture(nn.Module):
    """Top-2 experts of each token: a queue per sequence and expert; tokens that overflow a queue are dropped."""

    def __init__(self, width: int, ff: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Parameter(torch.empty(width, experts))
        self.up = nn.Parameter(torch.empty(experts, width, ff))
        self.down = nn.Parameter(torch.empty(experts, ff, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        places = math.ceil(CAPACITY * 2 * tokens / self.experts)
        gates, chosen = (x @ self.router).softmax(-1).topk(2)
        gates = gates / gates.sum(-1, keepdim=True)
        # A token's first choice and then its second, tokens in order: where each stands in its expert's queue.
        chosen = chosen.flatten(1)
        place = (F.one_hot(chosen, self.experts).cumsum(1).gather(2, chosen[..., None]) - 1)[..., 0]
        # Queue after queue, and a last place for those that overflow.
        row = torch.arange(rows)[:, None]
        seat = ((row * self.experts + chosen) * places + place).where(place < places, rows * self.experts * places)
        seat = seat.flatten()
        inside = x.new_zeros(rows * self.experts * places + 1, width)
        inside = inside.index_copy(0, seat, x.repeat_interleave(2, 1).flatten(0, 1))
        queues = inside[:-1].unflatten(0, (rows, self.experts, places)).transpose(0, 1).flatten(1, 2)
        hidden = F.gelu(queues @ self.up, approximate="tanh")
        outside = (hidden @ self.down).unflatten(1, (rows, places)).transpose(0, 1).flatten(0, 2)
        outside = torch.cat([outside, outside.new_zeros(1, width)])
        return (outside[seat].unflatten(0, (rows, tokens, 2)) * gates[..., None]).sum(2)

    def views(self) -> Views:
        return {name: (getattr(self, name), whole) for name in ("router", "up", "down")}


class Block(nn.Module):
    """`experts`: 0 for none."""

    def __init__(self, width: int, heads: int, ff: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.second = Mixture(width, ff, experts) if experts else FeedForward(width, ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.second(self.norm2(x))

    def views(self) -> Views:
        norms = norm("norm1", self.norm1) | norm("norm2", self.norm2)
        return norms | self.attention.views() | self.second.views()


class LanguageModel(nn.Module):
    """`blocks`: heads, feed-forward width and experts of each."""

    def __init__(self, vocab: int, seq: int, width: int, blocks: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.empty(seq, width))
        self.blocks = nn.ModuleList(Block(width, *sizes) for sizes in blocks)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def views(self) -> Views:
        views: Views = {"embed": (self.embed.weight, whole), "position": (self.position, whole)}
        for i, block in enumerate(self.blocks):
            views |= under(f"block{i}", block.views())
        return views | norm("norm", self.norm)


def made(shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """The model that has parameters of these names and shapes in JAX."""
    count = lambda name: len({key.split(".")[0] for key in shapes if key.startswith(name)})
    if "embed" in shapes:
        sizes: list[tuple[int, int, int]] = []
        for i in range(count("block")):
            up = shapes.get(f"block{i}.up.kernel") or shapes[f"block{i}.up"]
            sizes.append((shapes[f"block{i}.query.kernel"][1], up[-1], up[0] if len(up) == 3 else 0))
        (vocab, width), (seq, _) = shapes["embed"], shapes["position"]
        return LanguageModel(vocab, seq, width, sizes)
    kernels = lambda name: [shapes[f"{name}{i}.kernel"] for i in range(count(name))]
    fulls = kernels("dense")
    if "head.kernel" in shapes:
        width, classes = shapes["head.kernel"]
        return Perceptron(width, classes, len(fulls))
    convs = kernels("conv")
    model = ConvNet([convs[0][2], *(k[3] for k in convs)], [fulls[0][0], *(k[1] for k in fulls)])
    return model.to(memory_format=torch.channels_last)


class Training:
    """A model and its optimizer in one of the processes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], bucket_mb: int = BUCKET_MB) -> None:
        model = made(shapes)
        self.bucket_mb = bucket_mb
        self.views: Views = model.views()
        self.parameters = list(model.parameters())
        if missed := self.views.keys() ^ shapes.keys():
            raise ValueError(f"the model in PyTorch and that in JAX differ in {', '.join(sorted(missed))}")
        self.model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, eps=1e-8, fused=True
        )
        for p in self.parameters:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.optimizer.state[p] = {"step": torch.zeros(()), **moments}
        self.batch: dict[str, Tensor] = {}
        self.share = 1.0

    def arrays(self) -> dict[str, Tensor]:
        """The state as JAX names it; views of the parameters and moments here."""
        named: dict[str, Tensor] = {"count": self.optimizer.state[self.parameters[0]]["step"]}
        for name, (p, view) in self.views.items():
            state = self.optimizer.state[p]
            for kind, x in (("params", p.detach()), ("mu", state["exp_avg"]), ("nu", state["exp_avg_sq"])):
                named[f"{kind}.{name}"] = view(x)
        return named

    def place(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.share = float(arrays["share"])
        for name, x in self.arrays().items():
            x.copy_(torch.from_numpy(arrays[name]))
        for p in self.parameters:
            self.optimizer.state[p]["step"].fill_(float(arrays["count"]))
        batch = {name.removeprefix("batch."): x for name, x in arrays.items() if name.startswith("batch.")}
        # Labels and indices are int64 in PyTorch.
        self.batch = {k: torch.from_numpy(x if x.dtype == np.float32 else x.astype(np.int64)) for k, x in batch.items()}

    def step(self) -> float:
        """The loss over the rows of all processes; its sum travels while the gradients are made."""
        loss = self.model(**self.batch) * self.share
        mean = loss.detach().clone()
        summed = dist.all_reduce(mean, async_op=True)
        self.optimizer.zero_grad()
        # DDP divides the sum of the processes' gradients by their number.
        (loss * dist.get_world_size()).backward()
        nn.utils.clip_grads_with_norm_(self.parameters, CLIPPED_TO, self.norm())
        self.optimizer.step()
        summed.wait()
        return mean.item()

    def norm(self) -> Tensor:
        """Of all gradients, from those of their rows as they lie in memory: as fast as `clip_grad_norm_`, which adds up
        one by one in float32 and is off by 1.6e-4 for `cnn`."""
        rows = [torch.linalg.vector_norm(p.grad, dim=1 if p.ndim == 4 else -1).flatten() for p in self.parameters]
        return torch.linalg.vector_norm(torch.cat(rows))


def prepared(arrays: Mapping[str, np.ndarray], bucket_mb: int = BUCKET_MB) -> Training:
    shapes = {k.removeprefix("params."): x.shape for k, x in arrays.items() if k.startswith("params.")}
    training = Training(shapes, bucket_mb)
    training.place(arrays)
    return training


def tuned(arrays: Mapping[str, np.ndarray]) -> Training:
    """That of the sizes of buckets whose steps take least; the same in all processes, which all call this."""
    took: list[float] = []
    for bucket_mb in TUNED_MB:
        training = prepared(arrays, bucket_mb)
        training.step()
        seconds = torch.zeros(TRIED, dtype=torch.float64)
        for i in range(TRIED):
            dist.barrier()
            began = time.perf_counter()
            training.step()
            seconds[i] = time.perf_counter() - began
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        took.append(seconds.min().item())
    return prepared(arrays, TUNED_MB[took.index(min(took))])


def serve(answer: Callable[[str], None]) -> None:
    training: Training | None = None
    arrays: dict[str, np.ndarray] = {}
    for line in sys.stdin:
        what, _, file = line.rstrip("\n").partition(" ")
        if what == "place":
            with np.load(file) as opened:
                arrays = dict(opened)
            if training is None:
                training = prepared(arrays)
            else:
                training.place(arrays)
            answer("ok")
        elif training is None:
            raise ValueError(f"asked for {what!r} before anything was placed")
        elif what == "tune":
            training = tuned(arrays)
            answer(str(training.bucket_mb))
        elif what == "step":
            answer(repr(training.step()))
        else:
            np.savez(file, **{name: x.numpy() for name, x in training.arrays().items()})
            answer("ok")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", metavar="HOST:PORT", required=True, help="where the first process listens")
    options = parser.parse_args()
    # Only answers go where answers are looked for, whatever a library prints.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{options.store}", rank=options.rank, world_size=options.world)
    serve(lambda text: print(text, file=answers, flush=True))
    # No parting: who asked may have ended the others already.
    os._exit(0)


if __name__ == "__main__":
    main()
