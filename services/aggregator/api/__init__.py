"""REST: what the aggregator answers, documented as OpenAPI under /docs."""
