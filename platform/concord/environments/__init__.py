"""Data as a set of named environments.

An :class:`Environments` has the names with their purposes (train, validate, test), and makes one environment's data on
demand, in the process that owns the environment. From arrays, from a folder, from any dataset whose examples name their
group, from images in ``DOMAIN/CLASS/IMAGE``, or from a generator; :class:`BatchStream` draws the batches.
For PyTorch's ``DataLoader`` there are :class:`EnvironmentSampler` and :class:`StackEnvironments`.
:func:`image_dataset` reads MNIST, CIFAR-10 or a folder of images. Each name is imported when it is used.
"""

from typing import TYPE_CHECKING

from concord.lazy_names import lazy_names

if TYPE_CHECKING:
    from concord.environments.batches import BatchStream
    from concord.environments.collection import Environment, Environments, HeldOut, split_held_out
    from concord.environments.data_loader import EnvironmentSampler, StackEnvironments, stack_environments
    from concord.environments.datasets import from_dataset
    from concord.environments.folder_environments import from_folder
    from concord.environments.image_folder import from_image_folder
    from concord.environments.images import ImageDataset, LabelledImages, image_dataset
    from concord.environments.label_noise import shuffle_labels
    from concord.environments.source import ExampleSource, InMemory, Switching

__all__ = [
    "BatchStream",
    "Environment",
    "EnvironmentSampler",
    "Environments",
    "ExampleSource",
    "HeldOut",
    "ImageDataset",
    "InMemory",
    "LabelledImages",
    "StackEnvironments",
    "Switching",
    "from_dataset",
    "from_folder",
    "from_image_folder",
    "image_dataset",
    "shuffle_labels",
    "split_held_out",
    "stack_environments",
]

__getattr__ = lazy_names(
    __name__,
    {
        "concord.environments.batches": ("BatchStream",),
        "concord.environments.collection": ("Environment", "Environments", "HeldOut", "split_held_out"),
        "concord.environments.data_loader": ("EnvironmentSampler", "StackEnvironments", "stack_environments"),
        "concord.environments.datasets": ("from_dataset",),
        "concord.environments.folder_environments": ("from_folder",),
        "concord.environments.image_folder": ("from_image_folder",),
        "concord.environments.images": ("ImageDataset", "LabelledImages", "image_dataset"),
        "concord.environments.label_noise": ("shuffle_labels",),
        "concord.environments.source": ("ExampleSource", "InMemory", "Switching"),
    },
)
