"""Planning: what a model costs to train or to serve, and the configuration that suits a wish.

It stands on top of everything and nothing stands on it. Arithmetic needs no torch; only
calibrating and measuring run the model.
"""
