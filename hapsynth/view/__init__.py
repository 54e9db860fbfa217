"""A plan as something to look at: a page of HTML that needs nothing else, and a trace for Perfetto."""

from hapsynth.view.chrome_trace import trace_events
from hapsynth.view.html_page import page
from hapsynth.view.notebook_view import notebook_html

__all__ = ["notebook_html", "page", "trace_events"]
