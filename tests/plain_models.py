"""Ordinary PyTorch modules, written as one writes them: images, sequences by recurrence, recommendation."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import Batch, Case, seeded
from torch import Tensor, nn

IMAGES, CLASSES = 8, 8


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(99)


def image_batch(size: int = 32, count: int = IMAGES) -> Batch:
    """Images [count, 3, size, size] and one class each."""
    generator = _generator()
    images = torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64).float()
    return {"images": images, "labels": torch.randint(0, CLASSES, (count,), generator=generator)}


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), norm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), norm(out)
        nn.init.zeros_(self.norm3.weight)  # as usual: blocks begin near the identity, or noise doubles with each
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm1(self.conv1(x)))
        y = F.gelu(self.norm2(self.conv2(y)))
        return F.gelu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """He et al. 2016's bottleneck network; GELU in place of ReLU, whose kinks make float32 a matter of luck.

    ``blocks`` are those of the four stages, (3, 4, 6, 3) for ResNet-50; ``norm(channels)`` makes a normalisation.
    """

    def __init__(
        self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 8, norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = norm(width)
        layers, channels = [], width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(_Bottleneck(channels, width << stage, 2 if stage and not i else 1, norm))
                channels = 4 * (width << stage)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """[batch, 3, size, size] and [batch] -> loss and logits [batch, classes]."""
        x = F.max_pool2d(F.gelu(self.norm(self.stem(images))), 3, 2, 1)
        logits = self.head(torch.flatten(F.adaptive_avg_pool2d(self.layers(x), 1), 1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def untracked(channels: int) -> nn.Module:
    """Batch norm that keeps no running statistics."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


def _double(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(4, out), nn.SiLU(),
    )


class UNet(nn.Module):
    """Down by pooling, up by a transposed convolution and by interpolation, with skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = _double(3, width), _double(width, 2 * width)
        self.middle = _double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.merge2 = _double(4 * width, 2 * width)
        self.up1 = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * width, width, 1))
        self.merge1 = _double(2 * width, width)
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """[batch, 3, size, size] and [batch] -> loss and logits [batch, classes, size, size]; labels are per image."""
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.avg_pool2d(second, 2))
        x = self.merge2(torch.cat([second, self.up2(x)], 1))
        logits = self.out(self.merge1(torch.cat([first, self.up1(x)], 1)))
        target = labels[:, None, None].expand(-1, *logits.shape[2:])
        return {"loss": F.cross_entropy(logits, target), "logits": logits}


class _Mobile(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels, track_running_stats=False)
        self.grouped = nn.Conv2d(channels, channels, 1, groups=2)
        self.squeeze, self.excite = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.depthwise(x)))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.grouped(y)


class MobileNet(nn.Module):
    """Depthwise and grouped convolutions with squeeze and excitation; returns logits alone."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.layers = nn.Sequential(*(_Mobile(width) for _ in range(layers)))
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, size, size] -> [batch, classes]."""
        return self.head(self.layers(F.hardswish(self.stem(images)))).mean((2, 3))


class ViT(nn.Module):
    """A vision transformer: patches by a strided convolution, a class token, torch's own encoder layers."""

    def __init__(self, hidden: int = 32, heads: int = 4, layers: int = 2, patch: int = 8, size: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, hidden, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, hidden))
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, hidden))
        layer = nn.TransformerEncoderLayer(hidden, heads, 2 * hidden, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """[batch, 3, size, size] and [batch] -> loss and logits [batch, classes]."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)[:, 0])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Tagger(nn.Module):
    """One tag a word, by recurrence in both directions. ``kind`` is ``nn.LSTM`` or ``nn.GRU``."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, hidden: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(64, hidden)
        self.rnn = kind(hidden, hidden, layers, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * hidden, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """[batch, words] twice -> loss and logits [batch, words, tags]."""
        logits = self.tags(self.rnn(self.words(ids))[0])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), "logits": logits}


def tag_batch() -> Batch:
    """Word ids and tags [batch, words], with tags of -100 spread unevenly."""
    generator = _generator()
    ids = torch.randint(0, 64, (8, 6), generator=generator)
    labels = torch.randint(0, CLASSES, (8, 6), generator=generator)
    labels[0, 1:] = -100
    labels[3, :4] = -100
    return {"ids": ids, "labels": labels}


class DLRM(nn.Module):
    """Naumov et al. 2019: dense features by an MLP, categories by embedding tables (single and in bags), their dot
    products, and an MLP on top."""

    def __init__(self, rows: int = 4096, hidden: int = 16, tables: int = 2) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, hidden))
        self.single = nn.ModuleList(nn.Embedding(rows, hidden) for _ in range(tables))
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, hidden, mode=mode) for mode in ("sum", "mean"))
        count = 1 + tables + len(self.bags)
        rows_, columns = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("pairs", rows_ * count + columns)
        self.top = nn.Sequential(nn.Linear(hidden + len(self.pairs), 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, features: Tensor, categories: Tensor, bags: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """[batch, 16], [batch, tables], [batch, 2, items] and [batch] -> loss and logits [batch]."""
        dense = self.dense(features)
        vectors = [dense, *(table(categories[:, i]) for i, table in enumerate(self.single))]
        vectors += [bag(bags[:, i]) for i, bag in enumerate(self.bags)]
        x = torch.stack(vectors, 1)
        products = (x @ x.transpose(1, 2)).flatten(1)[:, self.pairs]
        logits = self.top(torch.cat([dense, products], 1)).squeeze(1)
        return {"loss": F.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def click_batch() -> Batch:
    """Dense features, categories alone and in bags, and clicks."""
    generator = _generator()
    return {
        "features": torch.randn(8, 16, generator=generator, dtype=torch.float64).float(),
        "categories": torch.randint(0, 4096, (8, 2), generator=generator),
        "bags": torch.randint(0, 4096, (8, 2, 5), generator=generator),
        "labels": (torch.arange(8) == 3).float(),
    }


def _images_alone() -> Batch:
    return {"images": image_batch(16)["images"]}


#: Images of 64, so that the last stage has a few samples a channel to normalise.
RESNET50 = Case("resnet50", seeded(lambda: ResNet(norm=untracked)), lambda: image_batch(64))
RESNET = Case("resnet", seeded(lambda: ResNet((1, 1, 1, 1), norm=untracked)), lambda: image_batch(64))
UNET = Case("unet", seeded(UNet), lambda: image_batch(16))
MOBILENET = Case("mobilenet", seeded(MobileNet), _images_alone)
VIT = Case("vit", seeded(ViT), image_batch)
LSTM = Case("lstm", seeded(Tagger), tag_batch)
GRU = Case("gru", seeded(lambda: Tagger(nn.GRU)), tag_batch)
RECOMMENDER = Case("dlrm", seeded(DLRM), click_batch)

CASES = (RESNET50, RESNET, UNET, MOBILENET, VIT, LSTM, GRU, RECOMMENDER)
