"""Reads settings files and secrets."""
