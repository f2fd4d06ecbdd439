"""The subset of PromQL that dashboards need, answered from the store."""
