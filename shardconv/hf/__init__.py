"""The adapter to transformers and diffusers: model classes, models on the meta device, small models and their inputs.

No other package of shardconv imports them, as they are optional. Functions here import them when they are called, so
that importing their modules does not need them. The config determines the library: ``_class_name`` is of diffusers.
"""
