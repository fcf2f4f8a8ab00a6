"""Evaluation: answer metrics, and scoring an adapter on records."""
