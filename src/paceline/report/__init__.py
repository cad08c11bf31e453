from paceline.report.write import write_report

__all__ = ["write_report"]
