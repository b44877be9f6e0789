"""Slipstream inside other libraries; importing one of these modules registers it there."""

from slipstream.integrations.usage import report as report
