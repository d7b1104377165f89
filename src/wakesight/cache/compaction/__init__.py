"""Dropping for good: gather the kept slots of one state into smaller storage of their own."""
