"""Data as a set of named environments.

An :class:`Environments` has the names with their purposes (train, validate, test), and makes one environment's data on
demand, in the process that owns the environment. From arrays, from a folder, from any dataset whose examples name their
group, from images in ``DOMAIN/CLASS/IMAGE``, or from a generator; :class:`BatchStream` draws the batches.
For PyTorch's ``DataLoader`` there are :class:`EnvironmentSampler` and :class:`StackEnvironments`.
:func:`image_dataset` reads MNIST, CIFAR-10 or a folder of images.
"""

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
