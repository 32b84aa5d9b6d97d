"""Attaching to a model: adapters, recorder, writer, training gate. Everything here needs torch."""
