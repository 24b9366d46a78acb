"""Showing text and names that strangers chose: safe to print, in tables that fit, in pictures as they are written."""
