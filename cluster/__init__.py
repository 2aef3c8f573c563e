"""Supervises: replicas, their engines, and the controller that keeps them."""
