"""Backbones of torchvision and timm with a new linear head."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, replace_all_batch_norm_modules_

from metadist.errors import UserError, did_you_mean, first_line, one_line


class Backbone(nn.Module):
    """A network that computes features, with a new linear layer as its head.

    Batch norm uses the statistics of the batch, in training and in evaluation, and keeps no running
    statistics (MAML's protocol): running statistics would be changed in place by every inner step,
    which `torch.func` does not support, and would mix tasks. The running statistics of pretrained
    weights are dropped. With `running_statistics` they are kept, and evaluation uses them.

    Args:
        body: a network that maps images (n, channels, height, width) to features (n, features).
        input_shape: the shape of an image, (channels, height, width).
        outputs: the number of classes.
        running_statistics: whether batch norm keeps running statistics for evaluation.
        model: the model's options in the configuration, for error messages.

    Raises:
        UserError: inputs are not images, or the body does not support them.
    """

    def __init__(
        self,
        body: nn.Module,
        input_shape: tuple[int, ...],
        outputs: int,
        running_statistics: bool,
        model: str,
    ) -> None:
        super().__init__()
        self.running_statistics = running_statistics
        if not running_statistics:
            replace_all_batch_norm_modules_(body)
        self.body = body
        self.head = nn.Linear(self._count_features(input_shape, model), outputs)
        nn.init.zeros_(self.head.bias)

    def features(self, images: Tensor) -> Tensor:
        """The head's inputs: (n, channels, height, width) -> (n, features)."""
        return self.body(images)

    def forward(self, images: Tensor) -> Tensor:
        """Logits: (n, channels, height, width) -> (n, outputs)."""
        return self.head(self.features(images))

    @torch.no_grad()
    def _count_features(self, input_shape: tuple[int, ...], model: str) -> int:
        training, outputs = self.body.training, []
        try:
            with torch.random.fork_rng([]):  # for dropout
                for mode in (True, False):
                    buffers = {name: buffer.clone() for name, buffer in self.body.named_buffers()}
                    images = torch.zeros(2, *input_shape)
                    outputs.append(functional_call(self.body.train(mode), buffers, (images,)))
        except (RuntimeError, ValueError, AssertionError, IndexError) as error:
            reason = first_line(error)
            raise UserError(
                f"{model} does not take inputs of shape {input_shape} ({reason}): choose another "
                "network or dataset.size, or set what it needs in model.options."
            ) from error
        finally:
            self.body.train(training)
        if not all(isinstance(output, Tensor) and output.dim() == 2 for output in outputs):
            raise UserError(
                f"{model} does not compute one vector per image in training and evaluation: "
                "choose another network, or change model.options."
            )
        return outputs[0].shape[1]


class Torchvision(Backbone):
    """A classification network of torchvision, such as resnet18, with a new last linear layer.

    Images of one channel are repeated to three channels. The auxiliary heads of googlenet and
    inception_v3 are removed.

    Args:
        input_shape: the shape of an image, (channels, height, width).
        outputs: the number of classes.
        name: a name in `torchvision.models.list_models(torchvision.models)`.
        weights: pretrained weights, such as DEFAULT or IMAGENET1K_V1, downloaded by torchvision;
            None for random weights. Inputs should be normalized as in pretraining.
        options: further arguments of the network, such as {image_size: 84} for vision
            transformers.
        running_statistics: see `Backbone`.

    Raises:
        UserError: there is no such network, it has no linear head, or the download fails.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        name: str = "resnet18",
        weights: str | None = None,
        options: Mapping[str, Any] | None = None,
        running_statistics: bool = False,
    ) -> None:
        import torchvision.models as library

        model = f"model=torchvision model.name={name}"
        _check_name(name, library.list_models(library), "torchvision")
        body = _create(
            lambda: library.get_model(name, weights=weights, **dict(options or {})), model
        )
        if getattr(body, "aux_logits", False) and "aux_logits" not in (options or {}):
            # Pretrained weights do not allow the option aux_logits=False.
            body.aux_logits = False  # type: ignore[assignment]
            for name in {"aux1", "aux2", "AuxLogits"} & dict(body.named_children()).keys():
                setattr(body, name, None)
        linear = [key for key, module in body.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise UserError(f"{model} has no linear head to replace: choose another network.")
        body.set_submodule(linear[-1], nn.Identity())
        if input_shape[0] == 1:
            body = nn.Sequential(_Repeat(), body)
        super().__init__(body, input_shape, outputs, running_statistics, model)


def options_of_weights(name: str, weights: str) -> dict[str, Any]:
    """The options that torchvision sets by default for a network with pretrained weights.

    Args:
        name: the network's name.
        weights: see `Torchvision`.
    """
    import torchvision.models as library

    if name in ("googlenet", "inception_v3"):
        return {"transform_input": True}
    if name.startswith("vit_"):
        entry = weights.rpartition(".")[2]  # without the name of the enumeration
        return {"image_size": library.get_model_weights(name)[entry].meta["min_size"][0]}
    return {}


class Timm(Backbone):
    """A network of timm (PyTorch Image Models), without its classifier.

    Args:
        input_shape: the shape of an image, (channels, height, width).
        outputs: the number of classes.
        name: a name in `timm.list_models()`.
        pretrained: whether to load timm's pretrained weights, downloaded by timm. Inputs should be
            normalized as in pretraining.
        options: further arguments of `timm.create_model`, such as {img_size: 84} for vision
            transformers; arguments that name a file or an address of weights are refused.
        running_statistics: see `Backbone`.

    Raises:
        UserError: timm is not installed, there is no such network, the download fails, or an
            option is refused.
    """

    # A run saved by another person could name any file or address, and some versions of timm
    # execute pickled code in such a file.
    _refused = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        name: str = "resnet18",
        pretrained: bool = False,
        options: Mapping[str, Any] | None = None,
        running_statistics: bool = False,
    ) -> None:
        try:
            import timm
        except ImportError as error:
            raise UserError(
                "model=timm needs timm, which is not installed: pip install -e '.[timm]' in "
                "metadist's folder."
            ) from error
        model = f"model=timm model.name={name}"
        _check_name(name.partition(".")[0], timm.list_models(), "timm")
        if refused := [name for name in self._refused if name in (options or {})]:
            raise UserError(
                f"{model} takes no model.options.{refused[0]}: choose model.pretrained=true for "
                "timm's own weights, or init_from=FILE for others."
            )
        arguments = {"num_classes": 0, "in_chans": input_shape[0], **dict(options or {})}
        body = _create(lambda: timm.create_model(name, pretrained=pretrained, **arguments), model)
        super().__init__(body, input_shape, outputs, running_statistics, model)


class _Repeat(nn.Module):
    """Repeats one channel to three."""

    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)


def _create(create: Callable[[], nn.Module], model: str) -> nn.Module:
    try:
        return create()
    except Exception as error:  # constructors and downloads may raise anything
        reason = one_line(error)[:200]
        raise UserError(
            f"{model} cannot be created ({reason}): change model.options, or the pretrained "
            "weights that are asked for."
        ) from error


def _check_name(name: str, names: list[str], library: str) -> None:
    if name not in names:
        raise UserError(
            f"model.name={name} is no network of {library}{did_you_mean(name, names)}: choose "
            "another one, such as resnet18."
        )
