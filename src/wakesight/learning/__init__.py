"""Step 8: what a model itself says about the worth of its entries, written down for training.

Takes an engine and documents, gives one label file per document; next is the estimator that learns from them.
"""
