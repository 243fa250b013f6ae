from .cifar_fs import CifarFS
from .cub import CUB
from .dataset import ImageDataset, TaskDataset
from .decoded_images import DecodedImages
from .episode import (
    SPLITS,
    Episode,
    EpisodeDescription,
    Examples,
    TaskDistribution,
    TaskShape,
    key_generator,
    key_split,
    select_episodes,
    stack_episodes,
    task_keys,
)
from .fc100 import FC100
from .few_shot import FewShotTasks
from .generators import seed_from
from .glyphs import Glyphs
from .image_folder import ImageFolder
from .images import ImageClasses
from .mini_imagenet import MiniImageNet
from .omniglot import Omniglot
from .preprocessing import ImagePreprocessing
from .random_state import random_state, seed_generators
from .sinusoid import Sinusoid
from .supervised_tasks import SupervisedTasks
from .tiered_imagenet import TieredImageNet
from .transforms import Augment, Normalize

__all__ = [
    "CUB",
    "FC100",
    "SPLITS",
    "Augment",
    "CifarFS",
    "DecodedImages",
    "Episode",
    "EpisodeDescription",
    "Examples",
    "FewShotTasks",
    "Glyphs",
    "ImageClasses",
    "ImageDataset",
    "ImageFolder",
    "ImagePreprocessing",
    "MiniImageNet",
    "Normalize",
    "Omniglot",
    "Sinusoid",
    "SupervisedTasks",
    "TaskDataset",
    "TaskDistribution",
    "TaskShape",
    "TieredImageNet",
    "key_generator",
    "key_split",
    "random_state",
    "seed_from",
    "seed_generators",
    "select_episodes",
    "stack_episodes",
    "task_keys",
]
