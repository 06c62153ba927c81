"""Thin adapters to frameworks; nothing else imports them."""
