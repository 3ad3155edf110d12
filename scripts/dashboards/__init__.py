"""What Relight tells of itself, made from its own registries: the page of metrics, Grafana dashboards, alert rules.

`make docs` writes all of it; a query that names a metric or a label that no registry has is refused.
"""
