#!/usr/bin/env bash
echo hello >/app/greeting.txt
