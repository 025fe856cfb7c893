#!/bin/bash
echo nuba
