#!/bin/bash
cd /app
head -n 6 tuboni_bizore.txt | grep gibi > koma.log
