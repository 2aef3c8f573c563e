"""Faces users: HTTP and gRPC in, text out. Knows no torch and no ray."""
