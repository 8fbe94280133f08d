"""The adapter to transformers: model classes, models on the meta device, small models and their inputs.

No other package of shardconv imports transformers, which is optional. Functions here import it when they are called, so
that importing their modules does not need it.
"""
