"""Losses of other models than language models, and what mst makes of each.

Dense predictions of images, transducers (RNN-T), CTC, and contrasts of the patches of an image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, IGNORED = 16, 96, 255


# ---- one class for each pixel --------------------------------------------------------------------
class Segmentation(nn.Module):
    """A stem that reads neighbours, and a head that is a convolution of one element."""

    def __init__(self, classes: int = CLASSES):
        super().__init__()
        self.stem = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.head = nn.Conv2d(WIDTH, classes, 1)
        self.second = nn.Conv2d(WIDTH, classes, 1, bias=False)
        self.register_buffer("class_weight", torch.rand(classes) + 0.5)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class ConvolutionalMLP(nn.Module):
    """Layers of convolutions of one element, around a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(1, WIDTH)
        self.up, self.down = nn.Conv2d(WIDTH, 8 * WIDTH, 1), nn.Conv2d(8 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.avg_pool2d(x, 3).square().mean(1).flatten().logsumexp(0)


Loss = Callable[[Segmentation, Tensor, Tensor], Tensor]


def images(batch: int = 3, height: int = 13, device: str = "cpu") -> list[Tensor]:
    """Images and a class for each pixel, some of them ignored: 663 pixels, which chunks of 128 do
    not divide."""
    x = torch.randn(batch, 4, height, 17, device=device)
    labels = torch.randint(0, CLASSES, (batch, height, 17), device=device)
    return [x, labels.masked_fill(labels % 7 == 0, IGNORED)]


def _one_hot(labels: Tensor, like: Tensor) -> Tensor:
    hot = F.one_hot(labels.clamp(max=CLASSES - 1), CLASSES)
    return hot.permute(0, 3, 1, 2).to(like.dtype)


def _cross_entropy(logits: Tensor, labels: Tensor, **kwargs: object) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, **kwargs)


def mean(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(x), labels)


def weighted(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    weight = model.class_weight.float()
    return _cross_entropy(model(x), labels, weight=weight, label_smoothing=0.1)


def channels_last(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    return mean(model, x.contiguous(memory_format=torch.channels_last), labels)


def einsum(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    weight = model.second.weight[:, :, 0, 0]
    logits = torch.einsum("cd,bdhw->bchw", weight, model.features(x))
    return _cross_entropy(logits, labels)


def matmul(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.second.weight[:, :, 0, 0] @ model.features(x).flatten(2)
    return _cross_entropy(logits, labels.flatten(1))


def linear(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    rows = model.features(x).permute(0, 2, 3, 1)
    logits = F.linear(rows, model.second.weight[:, :, 0, 0]).permute(0, 3, 1, 2)
    return _cross_entropy(logits, labels)


def of_sequences(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    """A convolution over one dim."""
    logits = F.conv1d(model.features(x).flatten(2), model.second.weight[:, :, 0])
    return _cross_entropy(logits, labels.flatten(1))


def focal(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    each = _cross_entropy(model(x), labels, reduction="none")
    return ((1 - torch.exp(-each)).square() * each).mean()


def of_each_class(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    logits = model(x).float()
    return F.binary_cross_entropy_with_logits(logits, _one_hot(labels, logits))


def two_heads(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    features = model.features(x)
    auxiliary = _cross_entropy(model.second(features), labels)
    return _cross_entropy(model.head(features), labels) + 0.4 * auxiliary


def _dice(logits: Tensor, labels: Tensor, dims: tuple[int, ...]) -> Tensor:
    shares = logits.float().softmax(1)
    right = _one_hot(labels, shares)
    both, either = (shares * right).sum(dims), shares.sum(dims) + right.sum(dims)
    return 1 - ((2 * both + 1) / (either + 1)).mean()


def dice(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    """Sums over all pixels within a quotient."""
    return _dice(model(x), labels, (0, 2, 3))


def dice_and_mean(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    logits = model(x)
    return _dice(logits, labels, (0, 2, 3)) + _cross_entropy(logits, labels)


DENSE: dict[str, tuple[Loss, str]] = {  # with the mode of the region
    "mean": (mean, "fused"),
    "weighted": (weighted, "fused"),
    "channels last": (channels_last, "fused"),
    "einsum": (einsum, "fused"),
    "matmul": (matmul, "fused"),
    "linear": (linear, "fused"),
    "of sequences": (of_sequences, "fused"),
    "focal": (focal, "fused"),
    "of each class": (of_each_class, "fused"),
    "two heads": (two_heads, "fused"),
    "dice": (dice, "recompute"),
    "dice and mean": (dice_and_mean, "recompute"),
}


def upsampled(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    logits = F.interpolate(model(x[..., ::2, ::2]), size=x.shape[2:], mode="bilinear")
    return _cross_entropy(logits, labels)


def smooth(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    """A kernel of three by three reads neighbours."""
    kernel = model.second.weight.expand(-1, -1, 3, 3)
    return _cross_entropy(F.conv2d(model.features(x), kernel, padding=1), labels)


def blurred(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(F.avg_pool2d(model(x), 3, 1, 1), labels)


def dice_of_images(model: Segmentation, x: Tensor, labels: Tensor) -> Tensor:
    return _dice(model(x), labels, (2, 3))


REFUSED_DENSE: dict[str, tuple[Loss, str]] = {  # with a part of the reason
    "upsampled": (upsampled, "picks tokens"),
    "blurred": (blurred, "avg_pool2d.default: pools neighbouring positions"),
    "dice of images": (dice_of_images, "reduces over some of the token dims"),
}


# ---- transducers ---------------------------------------------------------------------------------
class Transducer(nn.Module):
    def __init__(self, vocabulary: int = CLASSES):
        super().__init__()
        self.encoder, self.predictor = nn.Linear(4, WIDTH), nn.Embedding(vocabulary, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def planes(self, frames: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probabilities of a blank and of the next label, ``[B, T, U]``."""
        after = F.pad(labels, (1, 0))
        joint = self.encoder(frames)[:, :, None] + self.predictor(after)[:, None]
        log_p = torch.log_softmax(self.head(torch.tanh(joint)).float(), -1)
        following = F.pad(labels, (0, 1))[:, None, :, None].expand(*joint.shape[:3], 1)
        return log_p[..., 0], log_p.gather(-1, following)[..., 0]


def speech(batch: int = 3, frames: int = 23, length: int = 8) -> list[Tensor]:
    return [torch.randn(batch, frames, 4), torch.randint(1, CLASSES, (batch, length))]


def lattice(model: Transducer, frames: Tensor, labels: Tensor) -> Tensor:
    """The log-likelihood of the labels, one diagonal of the lattice after the other."""
    blank, label = model.planes(frames, labels)
    num_frames, positions = blank.shape[1:]
    alpha = [[torch.zeros_like(blank[:, 0, 0])] * positions for _ in range(num_frames)]
    for t in range(num_frames):
        for u in range(positions):
            ways = []
            if t:
                ways.append(alpha[t - 1][u] + blank[:, t - 1, u])
            if u:
                ways.append(alpha[t][u - 1] + label[:, t, u - 1])
            if ways:
                alpha[t][u] = ways[0] if len(ways) == 1 else torch.logaddexp(*ways)
    return -(alpha[-1][-1] + blank[:, -1, -1]).mean()


def of_planes(model: Transducer, frames: Tensor, labels: Tensor) -> Tensor:
    """A function of both planes that mixes frames, as a lattice does."""
    blank, label = model.planes(frames, labels)
    return -torch.logsumexp(blank.cumsum(1) + label.cumsum(2), (1, 2)).mean()


def monotonic(model: Transducer, frames: Tensor, labels: Tensor) -> Tensor:
    blank, label = model.planes(frames, labels)
    return -(blank + label).mean()


SPEECH: dict[str, tuple[Callable[[Transducer, Tensor, Tensor], Tensor], str]] = {
    "monotonic": (monotonic, "fused"),
    "of planes": (of_planes, "recompute"),
    "lattice": (lattice, "recompute"),
}


# ---- CTC -----------------------------------------------------------------------------------------
def ctc(model: Transducer, frames: Tensor, labels: Tensor) -> Tensor:
    """Dynamo compiles no ``ctc_loss``: the log-probabilities leave the graph."""
    log_p = model.head(model.encoder(frames)).float().log_softmax(-1).transpose(0, 1)
    lengths = ((n,) * frames.shape[0] for n in (frames.shape[1], labels.shape[1]))
    return F.ctc_loss(log_p, labels, *lengths, reduction="sum")


def ctc_of_picked(model: Transducer, frames: Tensor, labels: Tensor) -> Tensor:
    """The same in plain PyTorch: a recursion over the log-probabilities of blanks and labels."""
    log_p = model.head(model.encoder(frames)).float().log_softmax(-1)
    around = torch.stack((torch.zeros_like(labels), labels), -1).flatten(1)
    states = F.pad(around, (0, 1))  # blank, label, blank, ..., label, blank
    log_p = log_p.gather(-1, states[:, None].expand(-1, frames.shape[1], -1))
    skips = (states != 0) & (states != states.roll(2, 1))
    first = torch.arange(states.shape[1], device=states.device) < 2
    alpha = torch.where(first, log_p[:, 0], -1e30)
    for t in range(1, frames.shape[1]):
        one = F.pad(alpha, (1, 0), value=-1e30)[:, :-1]
        two = F.pad(alpha, (2, 0), value=-1e30)[:, :-2].masked_fill(~skips, -1e30)
        alpha = torch.stack((alpha, one, two)).logsumexp(0) + log_p[:, t]
    return -torch.logaddexp(alpha[:, -1], alpha[:, -2]).sum()


# ---- patches of an image -------------------------------------------------------------------------
class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-1.0))

    def embed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.query(x), dim=-1), F.normalize(self.key(y), dim=-1)

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        u, v = self.embed(x, y)
        return u @ v.transpose(-1, -2) * self.scale.exp().to(u.dtype)


PatchLoss = Callable[[Patches, Tensor, Tensor], Tensor]


def patches(batch: int = 3, count: int = 150) -> list[Tensor]:
    return [torch.randn(batch, count, WIDTH), torch.randn(batch, count, WIDTH)]


def _diagonal(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[-2], device=logits.device)


def patch_nce(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y).float()
    labels = _diagonal(logits).expand(logits.shape[:2])
    return F.cross_entropy(logits.transpose(1, 2), labels)


def patch_nce_flat(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y).float()
    labels = _diagonal(logits).repeat(x.shape[0])
    return F.cross_entropy(logits.flatten(0, 1), labels)


def positive_first(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    """The positive of each row in front of all its negatives, as in contrastive translation."""
    u, v = model.embed(x, y)
    positive = (u * v).sum(-1, keepdim=True)
    same = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    negative = (u @ v.transpose(1, 2)).masked_fill(same, -10.0)
    logits = torch.cat((positive, negative), -1).float() / 0.07
    return -logits.log_softmax(-1)[..., 0].mean()


def positive_first_flat(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    u, v = model.embed(x, y)
    positive = (u * v).sum(-1).view(-1, 1)
    same = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    negative = (u @ v.transpose(1, 2)).masked_fill(same[None], -10.0).view(-1, x.shape[1])
    logits = torch.cat((positive, negative), 1).float() / 0.07
    return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))


def in_batch(model: Patches, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    u, v = model.embed(x, y)
    return u.flatten(0, 1), v.flatten(0, 1)


def hard_negatives(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    """Negatives count by how close they are, and those that are too close not at all."""
    u, v = in_batch(model, x, y)
    logits = (u @ v.t()).float() * model.scale.exp()
    same = _diagonal(logits)[:, None] == _diagonal(logits)
    too_close = (logits.detach() > 3.5) & ~same
    weight = torch.where(same, 0.0, 0.5 * logits.detach()).masked_fill(too_close, -torch.inf)
    return F.cross_entropy(logits + weight, _diagonal(logits))


def sigmoid(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    u, v = in_batch(model, x, y)
    logits = (u @ v.t()).float() * model.scale.exp() + model.bias
    signs = 2 * torch.eye(len(u), dtype=torch.bool, device=u.device).float() - 1
    return -F.logsigmoid(signs * logits).sum() / len(u)


def positive_column(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    u, v = in_batch(model, x, y)
    logits = torch.cat(((u * v).sum(-1, keepdim=True), u @ v.roll(1, 0).t()), 1).float() / 0.1
    return F.cross_entropy(logits, logits.new_zeros(len(u), dtype=torch.long))


PATCHES: dict[str, tuple[PatchLoss, int]] = {  # with the number of regions
    "rows of each image": (patch_nce, 1),
    "rows of all images": (patch_nce_flat, 3),  # a region for each image
    "positive first": (positive_first, 1),
    "positive first, of all images": (positive_first_flat, 3),
    "hard negatives": (hard_negatives, 1),
    "sigmoid": (sigmoid, 1),
    "positive column": (positive_column, 1),
}


def attended(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    """A product that another one reads: attention."""
    return (model.logits(x, y).softmax(-1) @ y).square().mean()


def sorted_patches(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    return model.logits(x, y).sort(1).values[:, -1].mean()


def neighbouring_patches(model: Patches, x: Tensor, y: Tensor) -> Tensor:
    logits = model.logits(x, y)
    return (logits * logits.roll(1, 1)).mean()


REFUSED_PATCHES: dict[str, tuple[PatchLoss, str]] = {
    "sorted": (sorted_patches, "sort.default works along a token dim"),
    "neighbours": (neighbouring_patches, "picks tokens"),
}
