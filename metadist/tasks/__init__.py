"""Few-shot tasks and the datasets that they are sampled from.

A task distribution is a dataset with a number of ways, shots and queries. The sampled task depends
on a key alone, so every worker samples the same task from the same key.
"""

from metadist.tasks.cifar_fs import CifarFS
from metadist.tasks.dataset import ImageDataset, TaskDataset
from metadist.tasks.episode import (
    SPLITS,
    Episode,
    Examples,
    TaskDistribution,
    key_generator,
    key_split,
    stack_episodes,
    task_keys,
)
from metadist.tasks.few_shot import FewShotTasks
from metadist.tasks.glyphs import Glyphs
from metadist.tasks.images import ImageClasses
from metadist.tasks.mini_imagenet import MiniImageNet
from metadist.tasks.omniglot import Omniglot
from metadist.tasks.sinusoid import Sinusoid
from metadist.tasks.supervised_tasks import SupervisedTasks
from metadist.tasks.transforms import Augment, Normalize

__all__ = [
    "SPLITS",
    "Augment",
    "CifarFS",
    "Episode",
    "Examples",
    "FewShotTasks",
    "Glyphs",
    "ImageClasses",
    "ImageDataset",
    "MiniImageNet",
    "Normalize",
    "Omniglot",
    "Sinusoid",
    "SupervisedTasks",
    "TaskDataset",
    "TaskDistribution",
    "key_generator",
    "key_split",
    "stack_episodes",
    "task_keys",
]
