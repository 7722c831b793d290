"""Making drafters: self-generated data, EAGLE3 heads, small standalone models, their figures."""
