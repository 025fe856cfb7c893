#!/bin/bash
cd /app
rm povuri_taga.csv && cp kavuke_pefaso.md dovo.md
