"""Tests; see README.md here."""
