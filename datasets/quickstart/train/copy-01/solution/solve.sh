#!/bin/bash
cd /app
cp bugu/rego.txt rani.log
