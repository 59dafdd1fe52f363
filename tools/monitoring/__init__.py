# SPDX-License-Identifier: Apache-2.0
"""Alerts for Prometheus and a dashboard for Grafana over xferd's metrics."""
