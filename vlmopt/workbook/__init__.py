"""The workbook: notebooks in batch, their records, figures and report, and the embedded model's recipe."""
