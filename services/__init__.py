"""Headrace's services; each imports `services.common` and never another service."""
