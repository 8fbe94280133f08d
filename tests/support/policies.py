"""Policies that several test modules use."""

from torch import nn

from shardconv import Layer, Policy


class MlpPolicy(Policy):
    """The example of convert_model's docstring: the first and the last layer of an nn.Sequential."""

    @staticmethod
    def original_layer_class():
        return nn.Sequential

    @staticmethod
    def mlp_in():
        return [Layer(weight="[0].weight", bias="[0].bias")]

    @staticmethod
    def mlp_out():
        return [Layer(weight="[-1].weight", bias="[-1].bias")]
