#!/bin/bash
cd /app
mkdir duri
